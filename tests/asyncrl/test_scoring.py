"""Scoring: columns cut into judged samples, version labels included, and what a failing reward function costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rewards import Completion, RewardFunction, Score
from asyncrl.scoring import Scorer, TooManyFailures, check_failures, version_spans
from asyncrl.types import Group, Prompt, SampleFailure, Trajectory, VersionSpan
from engine.types import GenerateResult

END = 2


def prompts(count: int) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(uid=f"p{index}", index=index, text=f"ask {index}", token_ids=(1, index), answer=f"a{index}")
        for index in range(count)
    )


def result(
    samples: Sequence[Sequence[int]],
    *,
    versions: Sequence[Sequence[int]] | None = None,
    finish_reasons: Sequence[str] | None = None,
) -> GenerateResult:
    """Columns of a replica's answers; the logprob of the n-th token of all is -n / 8."""
    tokens = [token for sample in samples for token in sample]
    labels = [v for sample in versions for v in sample] if versions is not None else [7] * len(tokens)
    return GenerateResult(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.arange(len(tokens), dtype=np.float32) / -8,
        versions=np.array(labels, np.int32),
        lengths=np.array([len(sample) for sample in samples], np.int32),
        finish_reasons=tuple(
            finish_reasons
            if finish_reasons is not None
            else ["stop" if sample and sample[-1] == END else "length" for sample in samples]
        ),
        busy_s=0.1,
    )


def spell(token_ids: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(chr(ord("a") + token) for token in ids) for ids in token_ids]


def length_reward(completion: Completion) -> float:
    return len(completion.token_ids) / 4


def scorer(reward: RewardFunction | Callable[[Completion], Any] = length_reward, *, max_attempts: int = 3) -> Scorer:
    return Scorer(reward=reward, decode=spell, stop_token_ids=(END,), max_attempts=max_attempts)


def groups_of(
    judge: Scorer, asked: tuple[Prompt, ...], answers: tuple[GenerateResult, ...], *, samples_per_prompt: int
) -> tuple[Group, ...]:
    return anyio.run(partial(judge.groups, asked, answers, samples_per_prompt=samples_per_prompt))


def judge(reward: Callable[[Completion], Any]) -> Trajectory | SampleFailure:
    """The verdict on one sample."""
    (group,) = groups_of(scorer(reward), prompts(1), (result([[5, 6, END]]),), samples_per_prompt=1)
    (verdict,) = (*group.trajectories, *group.failures)
    return verdict


def test_a_reward_function_sees_what_its_docstring_says() -> None:
    seen: list[Completion] = []

    def reward(completion: Completion) -> Score:
        seen.append(completion)
        return Score(reward=0.5, correct=True)

    (group,) = groups_of(scorer(reward), prompts(1), (result([[5, 6, END], [5, 6], [END]]),), samples_per_prompt=3)
    assert seen == [
        Completion(prompt="ask 0", response="fg", token_ids=(5, 6, END), finished=True, answer="a0"),
        Completion(prompt="ask 0", response="fg", token_ids=(5, 6), finished=False, answer="a0"),
        Completion(prompt="ask 0", response="", token_ids=(END,), finished=True, answer="a0"),
    ]
    assert [t.text for t in group.trajectories] == ["fg", "fg", ""]
    assert [t.finish_reason for t in group.trajectories] == ["stop", "length", "stop"]


def test_an_end_token_inside_a_response_stays_in_its_text() -> None:
    (group,) = groups_of(scorer(), prompts(1), (result([[5, END, 6, END]]),), samples_per_prompt=1)
    assert group.trajectories[0].text == "fcg"
    assert group.trajectories[0].token_ids.tolist() == [5, END, 6, END]


RAGGED = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12)


@given(samples=RAGGED, cut=st.integers(0, 12), samples_per_prompt=st.integers(1, 3))
def test_every_sample_comes_back_in_its_place(samples: list[list[int]], cut: int, samples_per_prompt: int) -> None:
    """However the replicas shared the prompts, sample k of prompt p is what was written for it, token by token."""
    num_prompts = max(1, len(samples) // samples_per_prompt)
    samples = [samples[index % len(samples)] for index in range(num_prompts * samples_per_prompt)]
    border = min(cut, num_prompts) * samples_per_prompt
    parts = [result(part) for part in (samples[:border], samples[border:]) if part]
    groups = groups_of(scorer(), prompts(num_prompts), tuple(parts), samples_per_prompt=samples_per_prompt)
    assert [group.prompt for group in groups] == list(prompts(num_prompts))
    flat = [trajectory for group in groups for trajectory in group.trajectories]
    assert [(t.prompt_uid, t.sample_index) for t in flat] == [
        (f"p{p}", k) for p in range(num_prompts) for k in range(samples_per_prompt)
    ]
    assert [t.token_ids.tolist() for t in flat] == samples
    assert [t.reward for t in flat] == [len(sample) / 4 for sample in samples]
    assert all(t.loss_mask.tolist() == [1.0] * len(sample) for t, sample in zip(flat, samples, strict=True))
    logprobs = np.concatenate([part.logprobs for part in parts])
    assert np.array_equal(np.concatenate([t.generator_logprobs for t in flat]), logprobs)
    assert all(t.token_ids.dtype == np.int32 for t in flat)
    assert all(t.loss_mask.dtype == t.generator_logprobs.dtype == np.float32 for t in flat)


LABELLED = st.lists(st.lists(st.integers(3, 5), max_size=6), min_size=1, max_size=6)


@given(LABELLED)
def test_honest_version_labels(labels: list[list[int]]) -> None:
    """Every token keeps the version that computed it; spans cover a response without gaps and are as long as can be."""
    samples = [[9] * len(label) for label in labels]
    (group,) = groups_of(scorer(), prompts(1), (result(samples, versions=labels),), samples_per_prompt=len(labels))
    for trajectory, label in zip(group.trajectories, labels, strict=True):
        spans = trajectory.versions
        assert [span.version for span in spans for _ in range(span.start, span.stop)] == label
        assert [span.start for span in spans] == [0, *(span.stop for span in spans)][:-1]
        assert all(span.start < span.stop for span in spans)
        assert all(a.version != b.version for a, b in itertools.pairwise(spans))


def test_other_tasks_run_while_a_wave_is_judged() -> None:
    """Between any two groups."""
    judged: list[str] = []

    def reward(completion: Completion) -> float:
        judged.append(completion.prompt)
        return 1.0

    async def main() -> list[int]:
        seen: list[int] = []

        async def watch() -> None:
            while len(judged) < 4:
                seen.append(len(judged))
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await scorer(reward).groups(prompts(4), (result([[5]] * 4),), samples_per_prompt=1)
        return seen

    assert {1, 2, 3} <= set(anyio.run(main))


def test_spans_of_the_docstring() -> None:
    spans = (VersionSpan(start=0, stop=3, version=7), VersionSpan(start=3, stop=5, version=8))
    assert version_spans(np.array([7, 7, 7, 8, 8], np.int32)) == spans
    assert version_spans(np.array([], np.int32)) == ()


def test_one_way_data() -> None:
    """A group's arrays cannot be written to, and judging changes no value of the result."""
    answered = result([[5, 6, END], [7]])
    before = [column.copy() for column in (answered.token_ids, answered.logprobs, answered.versions, answered.lengths)]
    (group,) = groups_of(scorer(), prompts(1), (answered,), samples_per_prompt=2)
    for trajectory in group.trajectories:
        for array in (trajectory.token_ids, trajectory.loss_mask, trajectory.generator_logprobs):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
    after = (answered.token_ids, answered.logprobs, answered.versions, answered.lengths)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_reward_function_that_raises_costs_that_sample_only(max_attempts: int) -> None:
    calls: list[int] = []

    def reward(completion: Completion) -> float:
        calls.append(len(completion.token_ids))
        if len(completion.token_ids) == 2:
            raise KeyError("no such thing")
        return 1.0

    (group,) = groups_of(
        scorer(reward, max_attempts=max_attempts),
        prompts(1),
        (result([[5], [5, 6], [5, 6, END]]),),
        samples_per_prompt=3,
    )
    assert calls == [1, *[2] * max_attempts, 3]
    assert [t.sample_index for t in group.trajectories] == [0, 2]
    (failure,) = group.failures
    assert (failure.prompt_uid, failure.sample_index, failure.attempt) == ("p0", 1, max_attempts - 1)
    assert failure.reason == "the reward function raised KeyError: 'no such thing'"
    assert 'raise KeyError("no such thing")' in failure.traceback


def test_an_attempt_that_succeeds_later_counts() -> None:
    calls: list[Completion] = []

    def reward(completion: Completion) -> float:
        calls.append(completion)
        if len(calls) < 3:
            raise OSError("busy")
        return 1.0

    verdict = judge(reward)
    assert isinstance(verdict, Trajectory)
    assert (verdict.attempt, verdict.draw) == (2, 0)
    assert calls[0] == calls[2], "the same rollout is judged again"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "ValueError: the reward is nan; it must be a finite number"),
        (-math.inf, "ValueError: the reward is -inf; it must be a finite number"),
        (Score(reward=math.inf), "ValueError: the reward is inf; it must be a finite number"),
        (None, "TypeError: it returned None; a reward function returns a number or a Score"),
        ("1", "TypeError: the reward is '1'; it must be a number"),
        (Score(reward=1.0, correct=0.5), "TypeError: `correct` is 0.5; it must be True, False or None"),  # type: ignore[arg-type]
        (Score(reward=1.0, correct="no"), "TypeError: `correct` is 'no'; it must be True, False or None"),  # type: ignore[arg-type]
    ],
)
def test_a_verdict_that_is_none_fails_the_sample(value: object, reason: str) -> None:
    verdict = judge(lambda _: value)
    assert isinstance(verdict, SampleFailure)
    assert verdict.reason.startswith(f"the reward function raised {reason}")


@pytest.mark.parametrize(
    ("value", "reward", "correct"),
    [
        (1, 1.0, None),
        (True, 1.0, None),
        (np.float32(0.5), 0.5, None),
        (np.array(0.25), 0.25, None),
        (Score(reward=np.float32(0.5), correct=np.bool_(True)), 0.5, True),  # type: ignore[arg-type]
        (Score(reward=0, correct=False), 0.0, False),
    ],
)
def test_numpys_numbers_become_plain_ones(value: object, reward: float, correct: bool | None) -> None:
    """Trackers write JSON, which knows no numpy."""
    verdict = judge(lambda _: value)
    assert isinstance(verdict, Trajectory)
    assert (verdict.reward, verdict.correct) == (reward, correct)
    assert type(verdict.reward) is float
    assert verdict.correct is correct


def test_a_response_that_the_generator_cut_short_is_not_judged() -> None:
    def reward(completion: Completion) -> float:
        assert completion.token_ids == (5, END), "the other one is not the model's answer"
        return 1.0

    (group,) = groups_of(
        scorer(reward), prompts(1), (result([[5, END], [5]], finish_reasons=["stop", "abort"]),), samples_per_prompt=2
    )
    assert [t.sample_index for t in group.trajectories] == [0]
    (failure,) = group.failures
    assert failure.sample_index == 1
    assert failure.reason == 'the generator cut it short: its finish reason is "abort"'


def test_a_group_that_lost_everything_still_travels() -> None:
    def reward(completion: Completion) -> float:
        if completion.answer == "a0":
            raise RuntimeError("never")
        return 1.0

    lost, whole = groups_of(scorer(reward), prompts(2), (result([[5], [6], [7], [8]]),), samples_per_prompt=2)
    assert (len(lost.trajectories), len(lost.failures)) == (0, 2)
    assert (len(whole.trajectories), len(whole.failures)) == (2, 0)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_sample_too_many_or_too_few_is_a_defect(num_samples: int) -> None:
    with pytest.raises(AssertionError):
        groups_of(scorer(), prompts(1), (result([[5]] * num_samples),), samples_per_prompt=2)


def test_tokens_that_belong_to_no_sample_are_a_defect() -> None:
    columns = result([[5, 6]])
    short = GenerateResult(
        token_ids=columns.token_ids,
        logprobs=columns.logprobs,
        versions=columns.versions,
        lengths=np.array([1], np.int32),
        finish_reasons=("length",),
        busy_s=0.0,
    )
    with pytest.raises(AssertionError, match="the lengths add up to 1, there are 2 tokens"):
        groups_of(scorer(), prompts(1), (short,), samples_per_prompt=1)


def group(num_samples: int, num_failures: int) -> Group:
    def reward(completion: Completion) -> float:
        if completion.token_ids[0] < num_failures:
            raise ValueError(f"bad {completion.token_ids[0]}")
        return 0.0

    samples = result([[index] for index in range(num_samples)])
    (made,) = groups_of(scorer(reward), prompts(1), (samples,), samples_per_prompt=num_samples)
    return made


@given(sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4), rate=st.sampled_from([0, 0.25, 1]))
def test_too_large_a_share_of_failures_ends_the_run(sizes: list[tuple[int, int]], rate: float) -> None:
    groups = [group(good + bad, bad) for good, bad in sizes]
    num_samples, num_failures = sum(map(sum, sizes)), sum(bad for _, bad in sizes)
    if num_failures <= rate * num_samples:
        check_failures("step 3", groups, rate)
        return

    with pytest.raises(TooManyFailures, match=rf"^step 3: {num_failures} of {num_samples} samples failed") as caught:
        check_failures("step 3", groups, rate)
    assert f"max_failure_rate={rate:g}. The first, sample 0 of p0: the reward function raised ValueError: bad 0" in str(
        caught.value
    )
    assert str(caught.value).endswith("ValueError: bad 0"), "with the traceback"
