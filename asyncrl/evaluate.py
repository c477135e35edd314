"""Evaluation: held-out prompts answered by one weight version, sampled and greedy, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio

from asyncrl.metrics import EvalRecord
from asyncrl.rollout import Rollout
from asyncrl.scoring import Scorer, accuracy, check_failures
from asyncrl.types import Group, Prompt, Trajectory
from engine.types import Sampling, WeightVersion


class Evaluator:
    """Measures the version that the replicas serve. Its requests wait behind training's, with seeds of their own."""

    def __init__(
        self,
        *,
        rollout: Rollout,
        scorer: Scorer,
        prompts: tuple[Prompt, ...],
        samples_per_prompt: int,
        sampling: Sampling,
        greedy: bool,
        max_failure_rate: float,
        report: Callable[[EvalRecord, tuple[Group, ...]], None],
    ) -> None:
        """Args:
        prompts: held out; none of them is trained on.
        sampling: as in training; the greedy pass takes it at temperature 0.
        greedy: also answer every prompt once greedily.
        max_failure_rate: share of the answers that may go without a score.
        report: gets the record and the sampled groups.
        """
        self._rollout = rollout
        self._scorer = scorer
        self._prompts = prompts
        self._samples_per_prompt = samples_per_prompt
        self._sampling = sampling
        self._greedy = greedy
        self._max_failure_rate = max_failure_rate
        self._report = report

    async def run(self, version: WeightVersion) -> None:
        """Evaluate `version`, which the replicas serve until this returns.

        Raises:
            TooManyFailures: the reward function cannot judge the held-out answers.
        """
        started_s = anyio.current_time()
        sampled = await self._answer(version, self._samples_per_prompt, self._sampling)
        greedy: tuple[Group, ...] = ()
        if self._greedy:
            greedy = await self._answer(version, 1, replace(self._sampling, temperature=0.0))
        rewards = [t.reward for t in _trajectories(sampled)]
        record = EvalRecord(
            version=version,
            sampled_accuracy=accuracy(sampled),
            greedy_accuracy=accuracy(greedy),
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            num_prompts=len(self._prompts),
            num_failures=_num_failures(sampled) + _num_failures(greedy),
            eval_s=anyio.current_time() - started_s,
        )
        self._report(record, sampled)

    async def _answer(self, version: WeightVersion, samples_per_prompt: int, sampling: Sampling) -> tuple[Group, ...]:
        results = await self._rollout.evaluate(
            version=version, prompts=self._prompts, samples_per_prompt=samples_per_prompt, sampling=sampling
        )
        groups = await self._scorer.groups(self._prompts, results, samples_per_prompt=samples_per_prompt)
        check_failures(f"evaluation of version {version}", groups, self._max_failure_rate)
        return groups


def _trajectories(groups: tuple[Group, ...]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _num_failures(groups: tuple[Group, ...]) -> int:
    return sum(len(group.failures) for group in groups)
