"""How much a pipelined run gains over a synchronous one, and how far it is from the ideal. Side by side in one run.

For each recipe the same work is done, in rounds, by

    pipelined      max_staleness 1, each side pinned to its own core
    synchronous    max_staleness 0, the same workers (one thread a side)
    synchronous 2  max_staleness 0, other workers with two threads each, free to use both cores
    generator      the pipelined run's generators alone: the same waves, one after the other
    trainer        the pipelined run's trainer alone: the same batches, one after the other

`ideal` is the slower of the last two: no schedule can be faster with these workers. `of_ideal` is the pipelined rate
over it, `speedup` the pipelined rate over that of the better synchronous one. All are medians over the rounds,
of the steady state: the first wave of a schedule is left out.

    python benchmarks/overlap.py                       # both recipes
    python benchmarks/overlap.py --recipe configs/overlap_10m.yaml --rounds 3 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from asyncrl.batcher import BatchSpec, make_batch
from asyncrl.config import load_recipe
from asyncrl.data import PromptSets, open_prompts
from asyncrl.fleet import Fleet, cluster_for, fleet_spec
from asyncrl.idle import BusyClock, BusyTrainer, BusyWorker, IdleShares
from asyncrl.machine import this_machine
from asyncrl.model_source import ModelInfo, materialize
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

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULT_RECIPES = ("overlap_balanced.yaml", "overlap_unbalanced.yaml")


class SteadyRollout(Rollout):
    """A rollout whose replicas outlive one schedule: `stop` ends the watch, not the engines."""

    _over: anyio.Event

    async def watch(self) -> None:
        """Return when the schedule is over."""
        self._over = anyio.Event()
        await self._over.wait()

    async def stop(self) -> None:
        """End the schedule."""
        self._over.set()


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
            groups = scorer.groups(wave.prompts, wave.results, samples_per_prompt=recipe.trainer.samples_per_prompt)
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
                trainer=BusyTrainer(self.fleet.trainer, busy),
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
        rollout = self.rollout(BusyClock(anyio.current_time, num_replicas=self.recipe.generator.num_replicas))
        first = self.step - num_steps
        prompts = [self.take(first + index) for index in range(num_steps)]
        started = anyio.current_time()
        for index in range(num_steps):
            await rollout.generate(step=first + index, version=WeightVersion(self.step), prompts=prompts[index])
        return num_steps / (anyio.current_time() - started)

    async def trainer_alone(self, num_steps: int) -> float:
        """Steps per second of the trainer on batches that are ready, snapshots included."""
        publisher = self.fleet.publisher
        batches = self.recorded[:num_steps]
        started = anyio.current_time()
        for batch in batches:
            version = self.step + 1
            slot = publisher.reserve(version)
            result = await self.fleet.trainer.step(replace(batch, step=self.step), epoch=publisher.epoch, slot=slot)
            publisher.commit(version, result.digests)
            publisher.retire_below(version)
            self.step = version
        took = anyio.current_time() - started
        # The generators have seen none of these versions: bring them up to the newest.
        rollout = self.rollout(BusyClock(anyio.current_time, num_replicas=self.recipe.generator.num_replicas))
        newest = publisher.newest
        assert newest is not None
        await rollout.prepare(newest)
        await rollout.flip(newest)
        return len(batches) / took


async def _no_evaluation(version: WeightVersion) -> None:
    raise AssertionError(f"no evaluation was asked for, of version {version}")


async def _no_checkpoint(version: WeightVersion) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Steps per second of one round."""

    pipelined: float
    synchronous: float
    synchronous_2: float
    generator: float
    trainer: float
    idle: IdleShares


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


async def measure(path: Path, *, num_rounds: int, num_steps: int) -> list[Round]:
    """Run all five ways on one recipe, round by round; the first round warms up and is not reported."""
    recipe, machine = load_recipe(path).recipe, this_machine()
    both = [f"cluster.devices={2 * recipe.num_devices_needed}"]
    free = [*both, "trainer.threads=2", "generator.threads=2", "trainer.cpus=none", "generator.cpus=none"]
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        model = materialize(recipe.model, recipe.seed, Path(folder) / "model")
        async with (
            cluster_for(load_recipe(path, both).recipe, machine) as cluster,
            bench(path, both, cluster, model) as pinned,
            bench(path, free, cluster, model) as two_threads,
        ):
            gc.collect()
            gc.freeze()
            for _ in range(num_rounds + 1):
                pipelined, idle = await pinned.schedule(1, num_steps)
                generator = await pinned.generator_alone(num_steps)
                trainer = await pinned.trainer_alone(num_steps)
                synchronous, _ = await pinned.schedule(0, num_steps)
                synchronous_2, _ = await two_threads.schedule(0, num_steps)
                rounds.append(
                    Round(
                        pipelined=pipelined,
                        synchronous=synchronous,
                        synchronous_2=synchronous_2,
                        generator=generator,
                        trainer=trainer,
                        idle=idle,
                    )
                )
    return rounds[1:]


def summarize(rounds: Sequence[Round]) -> dict[str, float | list[float]]:
    """Medians over the rounds; ratios are taken within a round, where the machine was the same."""

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 4)

    speedups = [r.pipelined / max(r.synchronous, r.synchronous_2) for r in rounds]
    ideals = [r.pipelined / min(r.generator, r.trainer) for r in rounds]
    return {
        "pipelined_steps_per_s": median([r.pipelined for r in rounds]),
        "synchronous_steps_per_s": median([r.synchronous for r in rounds]),
        "synchronous_2_threads_steps_per_s": median([r.synchronous_2 for r in rounds]),
        "generator_alone_steps_per_s": median([r.generator for r in rounds]),
        "trainer_alone_steps_per_s": median([r.trainer for r in rounds]),
        "trainer_idle": median([r.idle.trainer_idle or 0.0 for r in rounds]),
        "generator_idle": median([r.idle.generator_idle or 0.0 for r in rounds]),
        "speedup": median(speedups),
        "speedup_range": [round(min(speedups), 3), round(max(speedups), 3)],
        "of_ideal": median(ideals),
        "of_ideal_range": [round(min(ideals), 3), round(max(ideals), 3)],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--recipe", type=Path, action="append", help="may be given several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps of one schedule; the recipe's trainer.num_steps if left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    results = {}
    for path in arguments.recipe or [CONFIGS / name for name in DEFAULT_RECIPES]:
        num_steps = arguments.steps if arguments.steps is not None else load_recipe(path).recipe.trainer.num_steps
        rounds = anyio.run(lambda: measure(path, num_rounds=arguments.rounds, num_steps=num_steps))  # noqa: B023
        results[path.stem] = summarize(rounds) | {"rounds": arguments.rounds, "steps": num_steps}
        table = Table(title=f"{path.stem}: medians of {arguments.rounds} rounds of {num_steps} steps")
        table.add_column("what")
        table.add_column("value", justify="right")
        for name, value in results[path.stem].items():
            table.add_row(name.replace("_", " "), str(value))
        Console().print(table)
    if arguments.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
