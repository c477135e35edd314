"""Evaluation: held-out prompts answered by one weight version, sampled and greedy, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio

from asyncrl.metrics import EvalRecord
from asyncrl.rollout import Rollout
from asyncrl.scoring import Scorer
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
        report: Callable[[EvalRecord, tuple[Group, ...]], None],
    ) -> None:
        """Args:
        prompts: held out; none of them is trained on.
        sampling: as in training; the greedy pass takes it at temperature 0.
        greedy: also answer every prompt once greedily.
        report: gets the record and the sampled groups.
        """
        self._rollout = rollout
        self._scorer = scorer
        self._prompts = prompts
        self._samples_per_prompt = samples_per_prompt
        self._sampling = sampling
        self._greedy = greedy
        self._report = report

    async def run(self, version: WeightVersion) -> None:
        """Evaluate `version`, which the replicas serve until this returns."""
        started_s = anyio.current_time()
        sampled = await self._answer(version, self._samples_per_prompt, self._sampling)
        greedy = None
        if self._greedy:
            greedy = _accuracy(await self._answer(version, 1, replace(self._sampling, temperature=0.0)))
        rewards = [t.reward for t in _trajectories(sampled)]
        record = EvalRecord(
            version=version,
            sampled_accuracy=_accuracy(sampled),
            greedy_accuracy=greedy,
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            num_prompts=len(self._prompts),
            eval_s=anyio.current_time() - started_s,
        )
        self._report(record, sampled)

    async def _answer(self, version: WeightVersion, samples_per_prompt: int, sampling: Sampling) -> tuple[Group, ...]:
        results = await self._rollout.evaluate(
            version=version, prompts=self._prompts, samples_per_prompt=samples_per_prompt, sampling=sampling
        )
        return self._scorer.groups(self._prompts, results, samples_per_prompt=samples_per_prompt)


def _trajectories(groups: tuple[Group, ...]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _accuracy(groups: tuple[Group, ...]) -> float | None:
    """Share of right answers; None if the reward function does not say what is right."""
    verdicts = [t.correct for t in _trajectories(groups) if t.correct is not None]
    return sum(verdicts) / len(verdicts) if verdicts else None
