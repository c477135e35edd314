"""What benchmarks/overlap.py drives: one fleet, scheduled again and again, and each side alone or both at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from asyncrl.batcher import BatchSpec, make_batch
from asyncrl.config import load_recipe
from asyncrl.data import PromptSets, open_prompts
from asyncrl.fleet import Fleet, fleet_spec
from asyncrl.idle import BusyClock, BusyTrainer, BusyWorker, IdleShares
from asyncrl.machine import this_machine
from asyncrl.model_source import ModelInfo
from asyncrl.rewards import load_reward
from asyncrl.rollout import Rollout
from asyncrl.scheduler import Parts, Scheduler, ScheduleSpec, Scored, StepOutcome
from asyncrl.schema import Recipe
from asyncrl.scoring import Scorer
from asyncrl.tokenizer import TextTokenizer
from asyncrl.wave import Wave
from engine.types import Sampling, WeightVersion
from engine.workers import Cluster, call_all
from trainers.types import Batch


class Steady:
    """Workers that outlive one schedule: `stop` ends the watch, not them."""

    _over: anyio.Event

    async def watch(self) -> None:
        """Return when the schedule is over."""
        self._over = anyio.Event()
        await self._over.wait()

    async def stop(self) -> None:
        """End the schedule."""
        self._over.set()


class SteadyRollout(Steady, Rollout):
    """The generators of many schedules."""


class SteadyTrainer(Steady, BusyTrainer):
    """The training ranks of many schedules."""


@dataclass
class Bench:
    """One fleet and everything that a schedule on it needs; keeps the version numbers going over several schedules."""

    recipe: Recipe
    fleet: Fleet
    model: ModelInfo
    tokenizer: TextTokenizer
    prompts: PromptSets
    step: int = 0
    recorded: list[Batch] = field(default_factory=list)

    def rollout(self, busy: BusyClock) -> SteadyRollout:
        recipe = self.recipe
        return SteadyRollout(
            replicas=[BusyWorker(worker, busy, index) for index, worker in enumerate(self.fleet.replicas)],
            run_seed=recipe.seed,
            sampling=Sampling(
                temperature=recipe.generator.temperature,
                max_tokens=recipe.generator.max_new_tokens,
                stop_token_ids=self.model.stop_token_ids,
            ),
            samples_per_prompt=recipe.trainer.samples_per_prompt,
            deadline_s=600.0,
            prepare_deadline_s=60.0,
            flip_deadline_s=60.0,
            stop_deadline_s=60.0,
        )

    def take(self, step: int) -> Any:  # noqa: ANN401
        count = self.recipe.trainer.prompts_per_step
        return self.prompts.train.take(step * count, count)

    async def schedule(self, max_staleness: int, num_steps: int) -> tuple[float, IdleShares]:
        """Run `num_steps` steps; return steps/s from the end of the first step on, and the idle shares.

        Filling the pipeline takes one wave, whatever the length of the run: it is left out.
        """
        recipe = self.recipe
        scorer = Scorer(
            reward=load_reward(recipe.reward),
            decode=self.tokenizer.decode_batch,
            stop_token_ids=self.model.stop_token_ids,
            max_attempts=1,
        )
        batch_spec = BatchSpec(
            dp=recipe.trainer.dp,
            micro_batch_tokens=recipe.trainer.micro_batch_tokens,
            normalize_std=recipe.algorithm.normalize_std,
            pack_all=recipe.algorithm.entropy_coef > 0.0,
        )
        busy = BusyClock(anyio.current_time, num_replicas=recipe.generator.num_replicas)
        finished: list[StepOutcome] = []

        async def score(wave: Wave) -> Scored:
            groups = await scorer.groups(
                wave.prompts, wave.results, samples_per_prompt=recipe.trainer.samples_per_prompt
            )
            return Scored(wave=wave, groups=groups, batch=make_batch(wave.step, groups, batch_spec))

        manifest = self.fleet.publisher.newest
        assert manifest is not None
        assert manifest.version == self.step
        scheduler = Scheduler(
            ScheduleSpec(
                num_steps=self.step + num_steps,
                first_step=self.step,
                max_staleness=max_staleness,
                max_failure_rate=0.0,
                eval_every=0,
                eval_deadline_s=60.0,
            ),
            Parts(
                take=self.take,
                generators=self.rollout(busy),
                score=score,
                trainer=SteadyTrainer(self.fleet.trainer, busy),
                publisher=self.fleet.publisher,
                evaluate=_no_evaluation,
                checkpoint=_no_checkpoint,
                report=finished.append,
            ),
            manifest,
        )
        busy.start()
        await scheduler.run()
        self.recorded = [outcome.scored.batch for outcome in finished]
        self.step += num_steps
        for replica in self.fleet.publisher.replicas:
            self.fleet.publisher.release(replica, self.step)
        return (num_steps - 1) / (finished[-1].ended_s - finished[0].ended_s), busy.total()

    async def generator_alone(self, num_steps: int) -> float:
        """Waves per second of the generators with nothing else going on."""
        return await self._generate(_Count(num_steps))

    async def trainer_alone(self, num_steps: int) -> float:
        """Steps per second of the trainer on batches that are ready, snapshots included."""
        rate = await self._train(_Count(num_steps))
        await self._deliver_newest()
        return rate

    async def both(self, num_steps: int) -> float:
        """Rate of the slower side when both work at once, neither waiting for the other; each goes on until both have
        done `num_steps`.
        """
        rates: list[float] = []
        count = _Count(num_steps, num_sides=2)

        async def one(side: Callable[[_Count], Awaitable[float]]) -> None:
            rates.append(await side(count))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, self._generate)
            tasks.start_soon(one, self._train)
        await self._deliver_newest()
        return min(rates)

    async def _generate(self, count: _Count) -> float:
        rollout = self.rollout(BusyClock(anyio.current_time, num_replicas=self.recipe.generator.num_replicas))
        version = WeightVersion(self.step)
        prompts = [self.take(self.step - len(self.recorded) + index) for index in range(len(self.recorded))]
        started, num_done = anyio.current_time(), 0
        while count.goes_on(num_done):
            await rollout.generate(step=num_done, version=version, prompts=prompts[num_done % len(prompts)])
            num_done += 1
            count.done(num_done)
        return num_done / (anyio.current_time() - started)

    async def _train(self, count: _Count) -> float:
        publisher = self.fleet.publisher
        started, num_done = anyio.current_time(), 0
        while count.goes_on(num_done):
            batch = replace(self.recorded[num_done % len(self.recorded)], step=self.step)
            version = self.step + 1
            slot = publisher.reserve(version)
            result = await self.fleet.trainer.step(batch, epoch=publisher.epoch, slot=slot)
            publisher.commit(version, result.digests)
            publisher.retire_below(version)
            self.step = version
            num_done += 1
            count.done(num_done)
        return num_done / (anyio.current_time() - started)

    async def _deliver_newest(self) -> None:
        """Bring the generators, which have seen none of the trainer's versions, up to the newest."""
        rollout = self.rollout(BusyClock(anyio.current_time, num_replicas=self.recipe.generator.num_replicas))
        newest = self.fleet.publisher.newest
        assert newest is not None
        await rollout.prepare(newest)
        await rollout.flip(newest)


class _Count:
    """When sides that work at once may stop: when each has done its number."""

    def __init__(self, num_steps: int, num_sides: int = 1) -> None:
        self._num_steps = num_steps
        self._num_open = num_sides

    def goes_on(self, num_done: int) -> bool:
        return num_done < self._num_steps or self._num_open > 0

    def done(self, num_done: int) -> None:
        self._num_open -= num_done == self._num_steps


async def _no_evaluation(version: WeightVersion) -> None:
    raise AssertionError(f"no evaluation was asked for, of version {version}")


async def _no_checkpoint(version: WeightVersion) -> None:
    return


@asynccontextmanager
async def bench(path: Path, overrides: Sequence[str], cluster: Cluster, model: ModelInfo) -> AsyncIterator[Bench]:
    """Start one fleet and keep its generators' pumps going while the block lasts."""
    recipe, machine = load_recipe(path, overrides).recipe, this_machine()
    tokenizer = TextTokenizer(model.folder)
    prompts = open_prompts(
        recipe.data,
        seed=recipe.seed,
        num_eval_prompts=0,
        tokenizer=tokenizer,
        max_prompt_tokens=recipe.max_prompt_tokens,
    )
    spec = fleet_spec(recipe, machine, model_dir=str(model.folder), hf_config=model.hf_config)
    with Fleet(spec, cluster) as fleet:
        await fleet.start()
        await fleet.publish_first(WeightVersion(0))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_pump, fleet)
            yield Bench(recipe=recipe, fleet=fleet, model=model, tokenizer=tokenizer, prompts=prompts)
            await call_all(fleet.replicas, "stop", deadline_s=60.0)


async def _pump(fleet: Fleet) -> None:
    await call_all(fleet.replicas, "run", deadline_s=None, grace_s=0.0)
