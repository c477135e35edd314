"""Evaluation: what is asked, and what the answers come to."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest

from asyncrl.evaluate import Evaluator
from asyncrl.metrics import EvalRecord
from asyncrl.rewards import Completion, RewardFunction, Score
from asyncrl.scoring import Scorer, TooManyFailures
from asyncrl.types import Group, Prompt
from engine.types import GenerateResult, Sampling, WeightVersion

SAMPLING = Sampling(temperature=0.75, max_tokens=4, stop_token_ids=(2,))
PROMPTS = tuple(Prompt(uid=f"p{i}", index=i, text=str(i), token_ids=(1, i), answer=str(i)) for i in range(4))


@dataclass
class FakeRollout:
    """Answers prompt p with token p, or p + 10 where it is `wrong` to; greedy answers are all right."""

    wrong: tuple[int, ...] = ()
    asked: list[tuple[int, int, Sampling]] = field(default_factory=list)

    async def evaluate(
        self, *, version: WeightVersion, prompts: tuple[Prompt, ...], samples_per_prompt: int, sampling: Sampling
    ) -> tuple[GenerateResult, ...]:
        assert prompts == PROMPTS
        self.asked.append((version, samples_per_prompt, sampling))
        await anyio.sleep(0.001)
        wrong = self.wrong if sampling.temperature > 0 else ()
        tokens = [p.index + 10 * (p.index in wrong) for p in prompts for _ in range(samples_per_prompt)]
        return (
            GenerateResult(
                token_ids=np.array(tokens, np.int32),
                logprobs=np.zeros(len(tokens), np.float32),
                versions=np.full(len(tokens), version, np.int32),
                lengths=np.ones(len(tokens), np.int32),
                finish_reasons=("length",) * len(tokens),
                busy_s=0.0,
            ),
        )


def exact(completion: Completion) -> Score:
    correct = completion.response == completion.answer
    return Score(reward=2.0 * correct, correct=correct)


def evaluate(
    rollout: FakeRollout, reward: RewardFunction = exact, *, samples_per_prompt: int = 1, greedy: bool = True
) -> tuple[EvalRecord, tuple[Group, ...]]:
    reports: list[tuple[EvalRecord, tuple[Group, ...]]] = []
    evaluator = Evaluator(
        rollout=rollout,  # type: ignore[arg-type]
        scorer=Scorer(
            reward=reward,
            decode=lambda batch: ["".join(map(str, ids)) for ids in batch],
            stop_token_ids=(99,),
            max_attempts=1,
        ),
        prompts=PROMPTS,
        samples_per_prompt=samples_per_prompt,
        sampling=SAMPLING,
        greedy=greedy,
        max_failure_rate=0.25,
        report=lambda record, groups: reports.append((record, groups)),
    )
    anyio.run(evaluator.run, WeightVersion(6))
    (report,) = reports
    return report


def test_one_version_sampled_and_greedy() -> None:
    rollout = FakeRollout(wrong=(1,))
    record, groups = evaluate(rollout, samples_per_prompt=2)
    greedy = Sampling(temperature=0.0, max_tokens=4, stop_token_ids=(2,))
    assert rollout.asked == [(6, 2, SAMPLING), (6, 1, greedy)]
    assert (record.version, record.num_prompts, record.num_failures) == (6, 4, 0)
    assert (record.sampled_accuracy, record.greedy_accuracy, record.reward_mean) == (0.75, 1.0, 1.5)
    assert record.eval_s > 0
    assert [group.prompt for group in groups] == list(PROMPTS)
    assert [[t.correct for t in group.trajectories] for group in groups] == [[True] * 2, [False] * 2] + [[True] * 2] * 2


def test_without_greedy_nothing_is_asked_greedily() -> None:
    rollout = FakeRollout()
    record, _ = evaluate(rollout, greedy=False)
    assert len(rollout.asked) == 1
    assert record.greedy_accuracy is None


def test_a_reward_without_a_notion_of_right_has_no_accuracy() -> None:
    record, _ = evaluate(FakeRollout(), lambda completion: 0.5)
    assert (record.sampled_accuracy, record.greedy_accuracy, record.reward_mean) == (None, None, 0.5)


def test_an_answer_without_a_score_counts_as_wrong_and_is_shown() -> None:
    def reward(completion: Completion) -> Score:
        if completion.answer == "3":
            raise ValueError("not a number")
        return exact(completion)

    record, groups = evaluate(FakeRollout(), reward)
    assert (record.sampled_accuracy, record.greedy_accuracy) == (0.75, 0.75)
    assert record.num_failures == 2, "one sampled, one greedy"
    assert record.reward_mean == 2.0
    assert len(groups[3].failures) == 1


def test_a_reward_that_cannot_judge_held_out_answers_ends_the_run() -> None:
    def reward(completion: Completion) -> Score:
        raise ValueError("never seen such a prompt")

    with pytest.raises(TooManyFailures, match=r"^evaluation of version 6: 4 of 4 samples failed.*such a prompt"):
        evaluate(FakeRollout(), reward)
