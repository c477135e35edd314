"""Scoring: token columns from the generators become judged Trajectories and Groups."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import anyio.lowlevel
import numpy as np

from asyncrl.rewards import Completion, RewardFunction, Score
from asyncrl.types import Group, Prompt, SampleFailure, Trajectory, VersionSpan
from engine.types import FloatArray, GenerateResult, IntArray, WeightVersion

_WHOLE = ("stop", "length")  # "abort" is none of the model's doing, so no reward may speak of it

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Token ids of many responses -> their texts, special tokens left out."""


class TooManyFailures(RuntimeError):
    """More samples of one step or evaluation failed than `schedule.max_failure_rate` allows."""


class Scorer:
    """Judges responses with the recipe's reward function.

    A reward function that raises, or returns no finite number, costs that sample only: it becomes a SampleFailure after
    `max_attempts` calls, and `check_failures` ends the run when too many do.
    """

    def __init__(
        self, *, reward: RewardFunction, decode: Decode, stop_token_ids: Sequence[int], max_attempts: int
    ) -> None:
        self._reward = reward
        self._decode = decode
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_attempts = max_attempts

    async def groups(
        self, prompts: tuple[Prompt, ...], results: tuple[GenerateResult, ...], *, samples_per_prompt: int
    ) -> tuple[Group, ...]:
        """Judge every sample; one group a prompt, in order. Other loops run between two groups: the generators' next
        request does not wait until a whole wave is judged.

        Args:
            prompts: P prompts.
            results: P * samples_per_prompt responses in all, sample k of prompt p at p * samples_per_prompt + k.
        """
        samples = [sample for result in results for sample in _split(result)]
        assert len(samples) == len(prompts) * samples_per_prompt, (len(samples), len(prompts), samples_per_prompt)
        texts = self._decode([self._without_stop(sample.token_list) for sample in samples])
        groups: list[Group] = []
        for index, prompt in enumerate(prompts):
            trajectories: list[Trajectory] = []
            failures: list[SampleFailure] = []
            for sample_index in range(samples_per_prompt):
                place = index * samples_per_prompt + sample_index
                scored = self._judge(prompt, sample_index, samples[place], texts[place])
                if isinstance(scored, Trajectory):
                    trajectories.append(scored)
                else:
                    failures.append(scored)
            groups.append(Group(prompt=prompt, trajectories=tuple(trajectories), failures=tuple(failures)))
            await anyio.lowlevel.checkpoint()
        return tuple(groups)

    def _judge(self, prompt: Prompt, sample_index: int, sample: _Sample, text: str) -> Trajectory | SampleFailure:
        if sample.finish_reason not in _WHOLE:
            return SampleFailure(
                prompt_uid=prompt.uid,
                sample_index=sample_index,
                attempt=0,
                reason=f'the generator cut it short: its finish reason is "{sample.finish_reason}"',
                traceback="",
            )

        completion = Completion(
            prompt=prompt.text,
            response=text,
            token_ids=sample.token_list,
            finished=sample.finish_reason == "stop",
            answer=prompt.answer,
        )
        failure: SampleFailure | None = None
        for attempt in range(self._max_attempts):
            try:
                score = _as_score(self._reward(completion))
            except Exception as error:  # noqa: BLE001 - whatever a user's function raises costs this sample only
                failure = SampleFailure(
                    prompt_uid=prompt.uid,
                    sample_index=sample_index,
                    attempt=attempt,
                    reason=f"the reward function raised {type(error).__name__}: {error}",
                    traceback=traceback.format_exc(),
                )
            else:
                return Trajectory(
                    prompt_uid=prompt.uid,
                    sample_index=sample_index,
                    draw=0,
                    attempt=attempt,
                    token_ids=sample.token_ids,
                    loss_mask=_ones(len(sample.token_list)),
                    generator_logprobs=sample.logprobs,
                    versions=sample.versions,
                    text=text,
                    reward=score.reward,
                    correct=score.correct,
                    finish_reason=sample.finish_reason,
                )

        assert failure is not None, "max_attempts must be >= 1"
        return failure

    def _without_stop(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        return token_ids[:-1] if token_ids and token_ids[-1] in self._stop_token_ids else token_ids


class _Sample(NamedTuple):
    """One response's pieces of a result's columns; read-only views, so that no later stage changes an earlier one's."""

    token_ids: IntArray
    token_list: tuple[int, ...]
    logprobs: FloatArray
    versions: tuple[VersionSpan, ...]
    finish_reason: str


def version_spans(versions: IntArray) -> tuple[VersionSpan, ...]:
    """Runs of equal versions.

    Example: [7, 7, 7, 8, 8] gives (VersionSpan(0, 3, 7), VersionSpan(3, 5, 8)).
    """
    if len(versions) == 0:
        return ()

    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    stops = [*starts[1:], len(versions)]
    return tuple(
        VersionSpan(start=start, stop=stop, version=WeightVersion(int(versions[start])))
        for start, stop in zip(starts, stops, strict=True)
    )


def _split(result: GenerateResult) -> Iterator[_Sample]:
    token_ids, logprobs = result.token_ids.view(), result.logprobs.view()
    for column in (token_ids, logprobs):
        column.flags.writeable = False
    token_list = tuple(token_ids.tolist())
    only = int(result.versions[0]) if len(token_list) and (result.versions == result.versions[0]).all() else None
    start = 0
    for length, finish_reason in zip(result.lengths.tolist(), result.finish_reasons, strict=True):
        part = slice(start, start + length)
        versions = _one_span(length, only) if only is not None else version_spans(result.versions[part])
        yield _Sample(token_ids[part], token_list[part], logprobs[part], versions, finish_reason)
        start += length
    assert start == len(token_list), f"the lengths add up to {start}, there are {len(token_list)} tokens"


@lru_cache(maxsize=1024)
def _one_span(length: int, version: int) -> tuple[VersionSpan, ...]:
    """The usual case, one version all along; the frozen span is shared."""
    return (VersionSpan(start=0, stop=length, version=WeightVersion(version)),) if length else ()


def _as_score(value: Score | float) -> Score:
    """Return what a user's function returned as plain Python values: numpy's would stop a tracker much later."""
    if value is None:
        raise TypeError("it returned None; a reward function returns a number or a Score")

    score = value if isinstance(value, Score) else Score(reward=value)
    if isinstance(score.reward, str | bytes):  # `float` would read it
        raise TypeError(f"the reward is {score.reward!r}; it must be a number")

    reward = float(score.reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}; it must be a finite number")

    if score.correct is not None and not isinstance(score.correct, bool | np.bool_):
        raise TypeError(f"`correct` is {score.correct!r}; it must be True, False or None")

    return Score(reward=reward, correct=bool(score.correct) if score.correct is not None else None)


@lru_cache(maxsize=1024)
def _ones(length: int) -> FloatArray:
    """Every token of a response is the model's own; the read-only array is shared."""
    ones = np.ones(length, np.float32)
    ones.flags.writeable = False
    return ones


def accuracy(groups: Sequence[Group]) -> float | None:
    """Share of right answers, one without a score being wrong; None if the reward function does not say what is right.

    Example: 6 right, 3 wrong and 1 that the reward function raised on give 0.6.
    """
    verdicts = [t.correct for group in groups for t in group.trajectories if t.correct is not None]
    num_failures = sum(len(group.failures) for group in groups)
    return sum(verdicts) / (len(verdicts) + num_failures) if verdicts else None


def check_failures(what: str, groups: Sequence[Group], max_rate: float) -> None:
    """Raise if a larger share than `max_rate` of all samples failed: a typo in a reward function is not data.

    Args:
        what: "step 3" or the like, for the message.

    Raises:
        TooManyFailures: with the first failure's reason and traceback.
    """
    failures = [failure for group in groups for failure in group.failures]
    num_samples = sum(len(group.trajectories) for group in groups) + len(failures)
    if len(failures) <= max_rate * num_samples:
        return

    first = failures[0]
    raise TooManyFailures(
        f"{what}: {len(failures)} of {num_samples} samples failed, more than schedule.max_failure_rate="
        f"{max_rate:g}. The first, sample {first.sample_index} of {first.prompt_uid}: {first.reason}\n"
        f"{first.traceback}".rstrip()
    )
