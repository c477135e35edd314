"""Scoring: token columns from the generators become judged Trajectories and Groups."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from asyncrl.rewards import Completion, RewardFunction, Score
from asyncrl.types import Group, Prompt, SampleFailure, Trajectory, VersionSpan
from engine.types import FloatArray, GenerateResult, IntArray, WeightVersion

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Token ids of many responses -> their texts, special tokens left out."""


class Scorer:
    """Judges responses with the recipe's reward function.

    A reward function that raises costs that sample only: it becomes a SampleFailure after `max_attempts` calls, and
    the scheduler ends the run when too many of a step fail.
    """

    def __init__(
        self, *, reward: RewardFunction, decode: Decode, stop_token_ids: Sequence[int], max_attempts: int
    ) -> None:
        self._reward = reward
        self._decode = decode
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_attempts = max_attempts

    def groups(
        self, prompts: tuple[Prompt, ...], results: tuple[GenerateResult, ...], *, samples_per_prompt: int
    ) -> tuple[Group, ...]:
        """Judge every sample; one group a prompt, in order.

        Args:
            prompts: P prompts.
            results: P * samples_per_prompt responses in all, sample k of prompt p at p * samples_per_prompt + k.
        """
        samples = [sample for result in results for sample in _split(result)]
        assert len(samples) == len(prompts) * samples_per_prompt, (len(samples), len(prompts), samples_per_prompt)
        texts = self._decode([self._without_stop(sample[0]) for sample in samples])
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
        return tuple(groups)

    def _judge(self, prompt: Prompt, sample_index: int, sample: _Sample, text: str) -> Trajectory | SampleFailure:
        token_ids, logprobs, versions, finish_reason = sample
        completion = Completion(
            prompt=prompt.text,
            response=text,
            token_ids=tuple(token_ids.tolist()),
            finished=finish_reason == "stop",
            answer=prompt.answer,
        )
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
                    token_ids=token_ids,
                    loss_mask=_ones(len(token_ids)),
                    generator_logprobs=logprobs,
                    versions=version_spans(versions),
                    reward=score.reward,
                    correct=score.correct,
                    finish_reason=finish_reason,
                )

        return failure

    def _without_stop(self, token_ids: IntArray) -> list[int]:
        ids: list[int] = token_ids.tolist()
        return ids[:-1] if ids and ids[-1] in self._stop_token_ids else ids


_Sample = tuple[IntArray, FloatArray, IntArray, str]


def version_spans(versions: IntArray) -> tuple[VersionSpan, ...]:
    """Runs of equal versions.

    Example: [7, 7, 7, 8, 8] gives (VersionSpan(0, 3, 7), VersionSpan(3, 5, 8)).
    """
    if len(versions) == 0:
        return ()

    if versions[0] == versions[-1] and (versions == versions[0]).all():  # the usual case, without the general way
        return (VersionSpan(start=0, stop=len(versions), version=WeightVersion(int(versions[0]))),)

    starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
    stops = [*starts[1:], len(versions)]
    return tuple(
        VersionSpan(start=start, stop=stop, version=WeightVersion(int(versions[start])))
        for start, stop in zip(starts, stops, strict=True)
    )


def _split(result: GenerateResult) -> Iterator[_Sample]:
    """Cut the columns into samples. The pieces are read-only views: a later stage cannot change an earlier one's."""
    for column in (result.token_ids, result.logprobs, result.versions):
        column.flags.writeable = False
    stops = np.cumsum(result.lengths).tolist()
    start = 0
    for stop, finish_reason in zip(stops, result.finish_reasons, strict=True):
        yield result.token_ids[start:stop], result.logprobs[start:stop], result.versions[start:stop], finish_reason
        start = stop


def _as_score(value: Score | float) -> Score:
    score = value if isinstance(value, Score) else Score(reward=float(value), correct=None)
    if not np.isfinite(score.reward):
        raise ValueError(f"the reward is {score.reward}; it must be a finite number")

    return score


def _ones(length: int) -> FloatArray:
    ones = np.ones(length, np.float32)
    ones.flags.writeable = False
    return ones
