"""The scheduler: rollouts on version v while version v + 1 is being trained. One task group, five loops.

    prompts --> [generate] --Wave--> [score] --Scored--> [train] --Manifest--> [publish]
                 ^      flip to v                                                  |
                 |                                                                 | prepare: received, verified
                 +------------------------- versions that may be served -----------+
                                      [watch] a dead worker

With P prompts a step, prompt i belongs to step s = i // P, and step s turns version s into version s + 1. The
rollouts of step s are written by version max(first version, s - max_staleness), exactly: what happens is a function
of the recipe and never of who wakes first. Every hand-over is a stream, and the versions bound how far ahead the
generators run: step s + max_staleness + 1 needs a version that step s has yet to make.

    max_staleness 1:   generate  | 0 on v0 | 1 on v0 | 2 on v1 | 3 on v2 |
                       train               | 0 -> v1 | 1 -> v2 | 2 -> v3 |

The loops know neither Ray, vLLM nor Megatron, and use anyio only, so that the same file runs on trio's virtual clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.scoring import check_failures
from asyncrl.types import Group, Prompt
from asyncrl.wave import PublishReport, Wave
from engine.publisher import Publisher
from engine.types import FlipReport, GenerateResult, Manifest, WeightVersion
from trainers.types import Batch, StepResult


class StalenessBroken(AssertionError):
    """Invariant 'bounded staleness' does not hold: a defect of the scheduler, never the user's."""


class EvaluationTooSlow(RuntimeError):
    """An evaluation held up a flip for longer than `eval.deadline_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """The numbers that decide what happens when.

    Attributes:
        num_steps: the run ends with version `num_steps`.
        first_step: 0, or the step that a resumed run goes on with; version `first_step` is there at the start.
        max_staleness: versions that a trained token may be old, >= 0; 0 is synchronous.
        max_failure_rate: share of one step's samples that may fail.
        eval_every: version 0, every n-th and the last one are evaluated; 0: none.
        eval_deadline_s: how long a flip waits for an evaluation.

    Example: max_staleness 2 and first_step 0 generate steps 0, 1 and 2 on version 0 and step 3 on version 1.
    """

    num_steps: int
    first_step: int = 0
    max_staleness: int
    max_failure_rate: float
    eval_every: int
    eval_deadline_s: float

    def version_for(self, step: int) -> WeightVersion:
        """The version that writes the rollouts of `step`."""
        return WeightVersion(max(self.first_step, step - self.max_staleness))

    def evaluates(self, version: int) -> bool:
        """Whether `version` is one of those that are evaluated."""
        return self.eval_every > 0 and (version % self.eval_every == 0 or version == self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A wave, judged and packed: what the train loop consumes."""

    wave: Wave
    groups: tuple[Group, ...]
    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Everything about one finished step, for trackers.

    Attributes:
        staleness: versions that the oldest trained token was old, measured when it was consumed; None if none was.
        started_s, ended_s: of the trainer's work, on the scheduler's clock.
    """

    scored: Scored
    result: StepResult
    staleness: int | None
    started_s: float
    ended_s: float


class Generators(Protocol):
    """All replicas."""

    async def prepare(self, manifest: Manifest) -> float:
        """Return the slowest replica's milliseconds."""
        ...

    async def flip(self, manifest: Manifest) -> tuple[FlipReport, ...]: ...
    async def generate(
        self, *, step: int, version: WeightVersion, prompts: tuple[Prompt, ...]
    ) -> tuple[GenerateResult, ...]: ...
    async def watch(self) -> None:
        """Return after `stop`; raise as soon as a replica dies."""
        ...

    async def stop(self) -> None: ...


class StepTrainer(Protocol):
    """The part of the trainer that the loops need."""

    async def step(self, batch: Batch, *, epoch: int, slot: int) -> StepResult: ...
    async def watch(self) -> None:
        """Return after `stop`; raise as soon as a rank dies."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Who does the work. Everything is injected, so that tests and the twin use the loops as they are.

    Attributes:
        take: step -> its prompts; a pure function of the step.
        score: judges a wave and packs it.
        evaluate: measures the version that the replicas serve.
        checkpoint: called with every version right after its step, before the trainer's next one.
        report: called once a step, in step order, when its version has been delivered.
    """

    take: Callable[[int], tuple[Prompt, ...]]
    generators: Generators
    score: Callable[[Wave], Awaitable[Scored]]
    trainer: StepTrainer
    publisher: Publisher
    evaluate: Callable[[WeightVersion], Awaitable[None]]
    checkpoint: Callable[[WeightVersion], Awaitable[None]]
    report: Callable[[StepOutcome], None]


class Scheduler:
    """Runs the loops until the last version is trained, delivered and evaluated.

    Raises whatever a loop raised, inside an ExceptionGroup; nothing is swallowed and nothing outlives `run`.
    """

    def __init__(self, spec: ScheduleSpec, parts: Parts, first_manifest: Manifest) -> None:
        """Args:
        first_manifest: of version `spec.first_step`, the newest in `parts.publisher`, served by all replicas.
        """
        assert first_manifest.version == spec.first_step, (first_manifest.version, spec.first_step)
        self._spec = spec
        self._parts = parts
        self._ready = {first_manifest.version: (first_manifest, 0.0)}  # prepared on all replicas: manifest, prepare ms
        self._changed = anyio.Condition()  # guards _ready and the publisher's slots
        self._serving = first_manifest.version
        self._publish = PublishReport(version=self._serving, prepare_ms=0.0, flip_ms=0.0, flips=())
        self._evaluation: anyio.Event | None = None
        self._lease(first_manifest.version)

    async def run(self) -> None:
        """Run to the end."""
        # As many places as versions allow to be ahead: the versions bound the generators, never a full stream.
        num_ahead = self._spec.max_staleness + 1
        wave_out, wave_in = anyio.create_memory_object_stream[Wave](num_ahead)
        scored_out, scored_in = anyio.create_memory_object_stream[Scored](num_ahead)
        made_out, made_in = anyio.create_memory_object_stream[tuple[Manifest, StepOutcome]](num_ahead)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_loop)
            tasks.start_soon(self._score_loop, wave_in, scored_out)
            tasks.start_soon(self._train_loop, scored_in, made_out)
            tasks.start_soon(self._publish_loop, made_in)
            self._evaluate_if_due(self._serving, tasks)
            await self._generate_loop(wave_out, tasks)
            await self._parts.generators.stop()

    async def _generate_loop(self, waves: MemoryObjectSendStream[Wave], tasks: TaskGroup) -> None:
        """Consumes prompts, produces waves, in step order.

        Waits for the version of the step (woken by the publish loop), and for a running evaluation before a flip. After
        the last wave it serves and evaluates the last version.
        """
        async with waves:
            for step in range(self._spec.first_step, self._spec.num_steps):
                await self._serve(self._spec.version_for(step), tasks)
                prompts = self._parts.take(step)
                started_s = anyio.current_time()
                results = await self._parts.generators.generate(step=step, version=self._serving, prompts=prompts)
                wave = Wave(
                    step=step,
                    version=self._serving,
                    prompts=prompts,
                    results=results,
                    started_s=started_s,
                    ended_s=anyio.current_time(),
                    publish=self._publish,
                )
                await waves.send(wave)
        await self._serve(WeightVersion(self._spec.num_steps), tasks)
        await self._evaluation_done()

    async def _score_loop(self, waves: MemoryObjectReceiveStream[Wave], scored: MemoryObjectSendStream[Scored]) -> None:
        """Consumes waves, produces scored batches, in step order, while the next wave is being written."""
        async with waves, scored:
            async for wave in waves:
                made = await self._parts.score(wave)
                check_failures(f"step {wave.step}", made.groups, self._spec.max_failure_rate)
                await scored.send(made)

    async def _train_loop(
        self, scored: MemoryObjectReceiveStream[Scored], made: MemoryObjectSendStream[tuple[Manifest, StepOutcome]]
    ) -> None:
        """Consumes scored batches, produces one version a step, also of a step that moved nothing.

        Waits for the score loop, and for a free slot in the store (woken by a flip).
        """
        publisher = self._parts.publisher
        async with scored, made:
            async for work in scored:
                batch, step = work.batch, work.wave.step
                staleness = self._measure_staleness(batch)
                version = WeightVersion(step + 1)
                started_s = anyio.current_time()
                if batch.is_empty:
                    result = StepResult.skip(step)
                    manifest = publisher.commit(version, unchanged=True)
                else:
                    slot = await self._reserve(version)
                    result = await self._parts.trainer.step(batch, epoch=publisher.epoch, slot=slot)
                    assert result.version == version, (result.version, version)
                    manifest = publisher.commit(version, result.digests)
                outcome = StepOutcome(
                    scored=work,
                    result=result,
                    staleness=staleness,
                    started_s=started_s,
                    ended_s=anyio.current_time(),
                )
                await made.send((manifest, outcome))
                await self._parts.checkpoint(version)
        await self._parts.trainer.stop()

    async def _publish_loop(self, made: MemoryObjectReceiveStream[tuple[Manifest, StepOutcome]]) -> None:
        """Consumes manifests, delivers each version to all replicas, wakes the generate loop, reports the step.

        Receiving and verifying go on while requests run; only the flip pauses a replica, and that is the generate
        loop's.
        """
        async with made:
            async for manifest, outcome in made:
                self._lease(manifest.version)
                prepare_ms = await self._parts.generators.prepare(manifest)
                async with self._changed:
                    self._ready[manifest.version] = (manifest, prepare_ms)
                    self._changed.notify_all()
                await anyio.lowlevel.checkpoint()  # the generate loop first: a replica waits for its flip
                self._parts.report(outcome)

    async def _watch_loop(self) -> None:
        """Waits for what must not happen, the death of a replica or of a training rank, and raises then.

        Returns when both sides have been stopped.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._parts.trainer.watch)
            await self._parts.generators.watch()

    async def _serve(self, version: WeightVersion, tasks: TaskGroup) -> None:
        """Have all replicas serve `version`, and start its evaluation if it is due."""
        if version != self._serving:
            async with self._changed:
                while version not in self._ready:
                    await self._changed.wait()
            await self._evaluation_done()
            manifest, prepare_ms = self._ready[version]
            started_s = anyio.current_time()
            flips = await self._parts.generators.flip(manifest)
            flip_ms = (anyio.current_time() - started_s) * 1e3
            self._publish = PublishReport(version=version, prepare_ms=prepare_ms, flip_ms=flip_ms, flips=flips)
            self._serving = version
            async with self._changed:
                self._give_back_below(version)
                self._changed.notify_all()
            self._evaluate_if_due(version, tasks)

    def _lease(self, version: WeightVersion) -> None:
        """Lend a version to all replicas: its slot stays until they have moved on."""
        for replica in self._parts.publisher.replicas:
            self._parts.publisher.hold(replica, version)

    def _give_back_below(self, version: WeightVersion) -> None:
        """All replicas serve `version`: whatever is older can go."""
        publisher = self._parts.publisher
        old = [v for v in self._ready if v < version]
        for replica in publisher.replicas:
            publisher.acknowledge(replica, version)
            for earlier in old:
                publisher.release(replica, earlier)
        for earlier in old:
            del self._ready[earlier]
        publisher.retire_below(version)

    def _evaluate_if_due(self, version: WeightVersion, tasks: TaskGroup) -> None:
        if self._spec.evaluates(version):
            self._evaluation = anyio.Event()
            tasks.start_soon(self._evaluate, version, self._evaluation)

    async def _evaluate(self, version: WeightVersion, done: anyio.Event) -> None:
        await self._parts.evaluate(version)
        done.set()

    async def _evaluation_done(self) -> None:
        """Wait for the running evaluation: it holds the version that it measures."""
        if self._evaluation is None:
            return

        try:
            with anyio.fail_after(self._spec.eval_deadline_s):
                await self._evaluation.wait()
        except TimeoutError as error:
            raise EvaluationTooSlow(
                f"the evaluation of version {self._serving} held up the next flip for more than "
                f"eval.deadline_s={self._spec.eval_deadline_s:g}; evaluate fewer prompts, or raise it"
            ) from error

    async def _reserve(self, version: WeightVersion) -> int:
        async with self._changed:
            while self._parts.publisher.num_free_slots == 0:
                await self._changed.wait()
            return self._parts.publisher.reserve(version)

    def _measure_staleness(self, batch: Batch) -> int | None:
        if batch.oldest_version is None:
            return None

        staleness = batch.step - batch.oldest_version
        if not 0 <= staleness <= self._spec.max_staleness:
            raise StalenessBroken(
                f"step {batch.step} would train on a token of version {batch.oldest_version}: {staleness} versions "
                f"old, max_staleness is {self._spec.max_staleness}"
            )

        return staleness
