"""The scheduler with strict fakes, on asyncio and on trio's virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import numpy as np
import pytest
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.scheduler import (
    EvaluationTooSlow,
    Parts,
    Scheduler,
    ScheduleSpec,
    Scored,
    StepOutcome,
)
from asyncrl.scoring import TooManyFailures
from asyncrl.types import Group, Prompt, SampleFailure
from asyncrl.wave import Wave
from engine.publisher import Publisher
from engine.types import FlipReport, GenerateResult, Manifest, WeightVersion
from trainers.types import Batch, MicroBatch, StepResult

REPLICAS = ("generator_0", "generator_1")


class Boom(RuntimeError):
    pass


@dataclass
class World:
    """Fake generators, trainer and evaluator over one log; refuses whatever the real ones would refuse."""

    generate_s: Callable[[int], float] = lambda step: 1.0
    train_s: Callable[[int], float] = lambda step: 1.0
    evaluate_s: float = 0.5
    prepare_s: float = 0.01
    empty: Callable[[int], bool] = lambda step: False
    failed: Callable[[int], int] = lambda step: 0
    dies_at: float | None = None
    rank_dies_at: float | None = None
    train_fails_at: int | None = None
    publisher: Publisher = field(default_factory=lambda: Publisher("hash", 1, 8, REPLICAS))
    log: list[tuple[Any, ...]] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    prepared: set[int] = field(default_factory=set)
    serving: int = 0
    generating: int = 0
    evaluating: int = 0
    training: int = 0
    slot_version: dict[int, int] = field(default_factory=dict)
    stopped: anyio.Event = field(default_factory=anyio.Event)
    trainer_stopped: anyio.Event = field(default_factory=anyio.Event)

    async def prepare(self, manifest: Manifest) -> float:
        await anyio.sleep(self.prepare_s)
        assert self.slot_version[manifest.slot] == manifest.written_version, "the slot was overwritten"
        self.prepared.add(manifest.version)
        self.log.append(("prepare", manifest.version))
        return self.prepare_s * 1e3

    async def flip(self, manifest: Manifest) -> tuple[FlipReport, ...]:
        assert manifest.version in self.prepared, "flip before prepare"
        assert self.generating == 0, "flip while requests run"
        assert self.evaluating == 0, "flip while an evaluation holds the version"
        await anyio.sleep(0.001)
        assert self.slot_version[manifest.slot] == manifest.written_version, "the slot was overwritten"
        self.serving = manifest.version
        self.log.append(("flip", manifest.version))
        return tuple(FlipReport(version=manifest.version, copy_ms=1, repack_ms=1, num_bytes=4) for _ in REPLICAS)

    async def generate(
        self, *, step: int, version: WeightVersion, prompts: tuple[Prompt, ...]
    ) -> tuple[GenerateResult, ...]:
        assert version == self.serving, (version, self.serving)
        assert self.generating == 0, "two waves at once"
        self.generating += 1
        await anyio.sleep(self.generate_s(step))
        assert version == self.serving
        self.generating -= 1
        self.log.append(("generate", step, version))
        return ()

    async def watch(self) -> None:
        await self._until(self.stopped, self.dies_at, "generator_0 died")

    async def _until(self, stopped: anyio.Event, dies_at: float | None, death: str) -> None:
        with anyio.move_on_after(dies_at if dies_at is not None else math.inf):
            await stopped.wait()
            return
        raise Boom(death)

    async def stop(self) -> None:
        self.stopped.set()

    async def step(self, batch: Batch, *, epoch: int, slot: int) -> StepResult:
        assert not batch.is_empty, "an empty batch must not reach the trainer"
        assert self.training == 0, "two steps at once"
        self.training += 1
        self.slot_version[slot] = -1  # being written
        await anyio.sleep(self.train_s(batch.step))
        if batch.step == self.train_fails_at:
            raise Boom(f"non-finite loss at step {batch.step}")
        self.slot_version[slot] = batch.step + 1
        self.training -= 1
        self.log.append(("train", batch.step))
        return replace(StepResult.skip(batch.step), skipped=False, digests={0: f"{batch.step:032x}"})

    async def score(self, wave: Wave) -> Scored:
        await anyio.sleep(0.001)
        empty = self.empty(wave.step)
        mask = np.zeros(1, np.float32) if empty else np.ones(1, np.float32)
        micro = MicroBatch(
            token_ids=np.zeros(1, np.int64),
            labels=np.zeros(1, np.int64),
            lengths=(1,),
            loss_mask=mask,
            advantages=mask,
            generator_logprobs=mask,
        )
        failure = SampleFailure(
            prompt_uid="p", sample_index=0, attempt=2, reason="bad reward", traceback="Traceback: x"
        )
        groups = tuple(
            Group(prompt=p, trajectories=(), failures=(failure,)) for p in wave.prompts[: self.failed(wave.step)]
        )
        batch = Batch(
            step=wave.step, micro_batches=((micro,),), num_loss_tokens=1, oldest_version=None if empty else wave.version
        )
        return Scored(wave=wave, groups=groups, batch=batch)

    async def evaluate(self, version: WeightVersion) -> None:
        assert version == self.serving
        self.evaluating += 1
        await anyio.sleep(self.evaluate_s)
        assert version == self.serving, "the version changed under an evaluation"
        self.evaluating -= 1
        self.log.append(("evaluate", version))

    async def checkpoint(self, version: WeightVersion) -> None:
        assert self.training == 0
        self.log.append(("checkpoint", version))

    def take(self, step: int) -> tuple[Prompt, ...]:
        return tuple(Prompt(uid=f"p{i}", index=step * 4 + i, text="", token_ids=(1,), answer="") for i in range(4))

    def parts(self) -> Parts:
        return Parts(
            take=self.take,
            generators=self,
            score=self.score,
            trainer=WorldTrainer(self),
            publisher=self.publisher,
            evaluate=self.evaluate,
            checkpoint=self.checkpoint,
            report=self.outcomes.append,
        )

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [entry[1:] for entry in self.log if entry[0] == kind]


@dataclass
class WorldTrainer:
    """The trainer's side of a world."""

    world: World

    async def step(self, batch: Batch, *, epoch: int, slot: int) -> StepResult:
        assert not self.world.trainer_stopped.is_set(), "a step after stop"
        return await self.world.step(batch, epoch=epoch, slot=slot)

    async def watch(self) -> None:
        await self.world._until(self.world.trainer_stopped, self.world.rank_dies_at, "trainer_0 died")

    async def stop(self) -> None:
        assert self.world.training == 0, "stopped in the midst of a step"
        self.world.trainer_stopped.set()


def spec(**changes: Any) -> ScheduleSpec:  # noqa: ANN401
    base = ScheduleSpec(num_steps=6, max_staleness=1, max_failure_rate=0.2, eval_every=0, eval_deadline_s=60.0)
    return replace(base, **changes)


async def drive(world: World, schedule: ScheduleSpec) -> float:
    slot = world.publisher.reserve(schedule.first_step)
    first = world.publisher.commit(schedule.first_step, {0: "f" * 32})
    world.slot_version[slot] = schedule.first_step
    world.serving = schedule.first_step
    world.prepared.add(schedule.first_step)
    started = anyio.current_time()
    await Scheduler(schedule, world.parts(), first).run()
    return anyio.current_time() - started


def run(world_kwargs: dict[str, Any], schedule: ScheduleSpec) -> tuple[World, float]:
    """On trio's virtual clock: days of waiting in no time, and a deadlock is an error at once."""

    async def main() -> tuple[World, float]:
        world = World(**{"publisher": Publisher("hash", 1, schedule.max_staleness + 2, REPLICAS), **world_kwargs})
        with anyio.fail_after(100_000):
            took = await drive(world, schedule)
        return world, took

    clock = trio.testing.MockClock(autojump_threshold=0)
    return anyio.run(main, backend="trio", backend_options={"clock": clock})


def leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    (only,) = group.exceptions
    return leaf(only) if isinstance(only, BaseExceptionGroup) else only


durations = st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 7.0]), min_size=10, max_size=10)


@settings(deadline=None, max_examples=60)
@given(
    max_staleness=st.integers(0, 4),
    num_steps=st.integers(0, 10),
    first_step=st.integers(0, 5),
    generate=durations,
    train=durations,
    empty=st.lists(st.booleans(), min_size=10, max_size=10),
    eval_every=st.integers(0, 3),
)
def test_bounded_staleness(
    max_staleness: int,
    num_steps: int,
    first_step: int,
    generate: list[float],
    train: list[float],
    empty: list[bool],
    eval_every: int,
) -> None:
    first_step = min(first_step, num_steps)
    schedule = spec(num_steps=num_steps, first_step=first_step, max_staleness=max_staleness, eval_every=eval_every)
    world, _ = run(
        {
            "generate_s": lambda step: generate[step],
            "train_s": lambda step: train[step],
            "empty": lambda step: empty[step],
        },
        schedule,
    )
    steps = list(range(first_step, num_steps))
    # Exactly this version wrote each step's rollouts, whatever was slow.
    assert world.of("generate") == [(step, max(first_step, step - max_staleness)) for step in steps]
    assert [outcome.result.step for outcome in world.outcomes] == steps
    for outcome in world.outcomes:
        step = outcome.result.step
        wanted = None if empty[step] else step - max(first_step, step - max_staleness)
        assert outcome.staleness == wanted
        assert outcome.staleness is None or outcome.staleness <= max_staleness
    assert world.serving == num_steps
    assert world.of("checkpoint") == [(step + 1,) for step in steps]
    evaluated = [version for (version,) in world.of("evaluate")]
    served = [first_step, *(version for (version,) in world.of("flip"))]
    assert evaluated == [v for v in served if eval_every and (v % eval_every == 0 or v == num_steps)]


@settings(deadline=None, max_examples=30)
@given(empty=st.lists(st.booleans(), min_size=8, max_size=8), max_staleness=st.integers(0, 3))
def test_every_step_makes_a_version(empty: list[bool], max_staleness: int) -> None:
    world, _ = run(
        {"empty": lambda step: empty[step]}, spec(num_steps=8, max_staleness=max_staleness, max_failure_rate=1.0)
    )
    assert [version for (version,) in world.of("prepare")] == list(range(1, 9))
    assert [outcome.result.version for outcome in world.outcomes] == list(range(1, 9))
    assert [outcome.result.skipped for outcome in world.outcomes] == empty
    newest = world.publisher.newest
    assert newest is not None
    trained = [step for step in range(8) if not empty[step]]
    assert newest.written_version == (trained[-1] + 1 if trained else 0)


def test_overlap_on_the_virtual_clock() -> None:
    _, synchronous = run({}, spec(num_steps=20, max_staleness=0))
    _, pipelined = run({}, spec(num_steps=20, max_staleness=1))
    assert synchronous == pytest.approx(40, rel=0.03)
    assert pipelined == pytest.approx(21, rel=0.03)


@pytest.mark.parametrize(("generate", "train"), [(0.1, 2.0), (2.0, 0.1)])
def test_the_slower_side_sets_the_pace(generate: float, train: float) -> None:
    _, took = run({"generate_s": lambda _: generate, "train_s": lambda _: train}, spec(num_steps=20, max_staleness=1))
    assert took == pytest.approx(20 * 2.0, rel=0.05)


@settings(deadline=None, max_examples=20)
@given(generate=durations, train=durations, max_staleness=st.integers(0, 3))
def test_the_order_in_which_tasks_wake_changes_nothing(
    generate: list[float], train: list[float], max_staleness: int
) -> None:
    """Trio shuffles the tasks that are ready; what is generated, trained and served must not notice."""
    logs = []
    for _ in range(3):
        world, _ = run(
            {"generate_s": lambda s: generate[s], "train_s": lambda s: train[s]},
            spec(num_steps=10, max_staleness=max_staleness, eval_every=2),
        )
        logs.append([world.of(kind) for kind in ("generate", "train", "flip", "prepare", "evaluate", "checkpoint")])
    assert logs[0] == logs[1] == logs[2]


def test_everything_filtered() -> None:
    world, _ = run({"empty": lambda step: True}, spec(num_steps=5))
    assert world.of("train") == []
    assert len(world.outcomes) == 5


def test_everything_failed_travels_when_allowed() -> None:
    world, _ = run({"empty": lambda step: True, "failed": lambda step: 4}, spec(num_steps=5, max_failure_rate=1.0))
    assert [len(outcome.scored.groups) for outcome in world.outcomes] == [4] * 5


def test_too_many_failures_end_the_run_with_the_first_traceback() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run({"failed": lambda step: 4 if step == 2 else 0}, spec(num_steps=5))
    error = leaf(caught.value)
    assert isinstance(error, TooManyFailures)
    assert "step 2: 4 of 4 samples failed" in str(error)
    assert "Traceback: x" in str(error)


def test_loud_failure_of_a_dead_generator() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run({"dies_at": 3.3}, spec(num_steps=50))
    assert isinstance(leaf(caught.value), Boom)


def test_loud_failure_of_a_rank_that_dies_while_the_generators_write() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run({"rank_dies_at": 3.3, "generate_s": lambda step: 10_000.0}, spec(num_steps=3))
    assert str(leaf(caught.value)) == "trainer_0 died"


def test_loud_failure_of_a_training_step() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run({"train_fails_at": 3}, spec(num_steps=50))
    assert "non-finite loss at step 3" in str(leaf(caught.value))


def test_an_evaluation_holds_its_version_and_changes_nothing_else() -> None:
    without, _ = run({}, spec(num_steps=10))
    with_evaluation, _ = run({"evaluate_s": 3.0}, spec(num_steps=10, eval_every=2))
    assert with_evaluation.of("evaluate") == [(0,), (2,), (4,), (6,), (8,), (10,)]
    assert with_evaluation.of("generate") == without.of("generate")
    assert with_evaluation.of("train") == without.of("train")


def test_an_evaluation_that_holds_up_a_flip_too_long_is_named() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        run({"evaluate_s": 30.0}, spec(num_steps=10, eval_every=2, eval_deadline_s=5.0))
    error = leaf(caught.value)
    assert isinstance(error, EvaluationTooSlow)
    assert "eval.deadline_s=5" in str(error)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_both_backends(backend: str) -> None:
    async def main() -> World:
        world = World(
            generate_s=lambda _: 0.002,
            train_s=lambda _: 0.001,
            evaluate_s=0.003,
            prepare_s=0.0,
            publisher=Publisher("hash", 1, 4, REPLICAS),
        )
        with anyio.fail_after(20):
            await drive(world, spec(num_steps=20, max_staleness=2, eval_every=5))
        return world

    world = anyio.run(main, backend=backend)
    assert world.of("generate") == [(step, max(0, step - 2)) for step in range(20)]
    assert world.serving == 20


def test_a_bug_that_trains_on_old_tokens_is_caught() -> None:
    async def main() -> None:
        world = World(publisher=Publisher("hash", 1, 3, REPLICAS))
        original = world.score

        async def score(wave: Wave) -> Scored:
            made = await original(wave)
            return replace(made, batch=replace(made.batch, oldest_version=WeightVersion(0)))

        world.score = score  # type: ignore[method-assign]
        await drive(world, spec(num_steps=5))

    with pytest.raises(BaseExceptionGroup) as caught:
        anyio.run(main, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)})
    assert "step 2 would train on a token of version 0: 2 versions old, max_staleness is 1" in str(leaf(caught.value))
