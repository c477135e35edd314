"""How busy both sides of the pipeline are: idle shares and their overlap, on an injected clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from engine.workers import Worker
from trainers.base import Trainer
from trainers.types import Batch, StepResult

Side = Literal["trainer", "generator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleShares:
    """What happened in one stretch of time.

    Attributes:
        wall_s: its length.
        trainer_busy_s: time in which a training step ran.
        generator_busy_s: time in which a replica had work, mean over the replicas.
        overlap_s: time in which the trainer and at least one replica were busy at once.

    Example: 10 s, the trainer busy in [0, 6), the only replica in [2, 10): trainer_idle 0.4, generator_idle 0.2,
    overlap 0.4.
    """

    wall_s: float
    trainer_busy_s: float
    generator_busy_s: float
    overlap_s: float

    @property
    def trainer_idle(self) -> float | None:
        """Share of the time in which no step ran; None for an empty stretch."""
        return self._share(self.trainer_wait_s)

    @property
    def generator_idle(self) -> float | None:
        """Share of the time in which a replica had nothing to do, mean over the replicas; None for an empty stretch."""
        return self._share(self.generator_wait_s)

    @property
    def overlap(self) -> float | None:
        """Share of the time in which both sides were busy; None for an empty stretch."""
        return self._share(self.overlap_s)

    @property
    def trainer_wait_s(self) -> float:
        """Time in which no step ran."""
        return self.wall_s - self.trainer_busy_s

    @property
    def generator_wait_s(self) -> float:
        """Time in which a replica had nothing to do, mean over the replicas."""
        return self.wall_s - self.generator_busy_s

    def _share(self, part_s: float) -> float | None:
        return min(max(part_s / self.wall_s, 0.0), 1.0) if self.wall_s > 0 else None

    def _since(self, earlier: IdleShares) -> IdleShares:
        return IdleShares(
            wall_s=self.wall_s - earlier.wall_s,
            trainer_busy_s=self.trainer_busy_s - earlier.trainer_busy_s,
            generator_busy_s=self.generator_busy_s - earlier.generator_busy_s,
            overlap_s=self.overlap_s - earlier.overlap_s,
        )


_NOTHING = IdleShares(wall_s=0.0, trainer_busy_s=0.0, generator_busy_s=0.0, overlap_s=0.0)


class BusyClock:
    """Adds up busy time as it passes; a few floats, whatever the length of the run.

    The trainer is one member (its ranks move in lockstep), each generator replica one. Members may be busy several
    times over (training and evaluation requests at once); they are idle when the last piece of work ends. Time counts
    from `start`, which the run calls when start-up is over; work that is under way then counts from there on.

    Args:
        clock: seconds, never falling; `anyio.current_time` in the scheduler, so that trio's virtual clock works.
        num_replicas: generator replicas, >= 1.
    """

    def __init__(self, clock: Callable[[], float], *, num_replicas: int = 1) -> None:
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be >= 1, got {num_replicas}")

        self._clock = clock
        self._depth: dict[Side, list[int]] = {"trainer": [0], "generator": [0] * num_replicas}
        self._last_s: float | None = None  # None until `start`
        self._wall_s = 0.0
        self._busy_s: dict[Side, float] = {"trainer": 0.0, "generator": 0.0}  # member-seconds
        self._overlap_s = 0.0
        self._lap_start = _NOTHING

    def start(self) -> None:
        """Begin to count: start-up is over. A second call changes nothing."""
        if self._last_s is None:
            self._last_s = self._clock()

    @contextmanager
    def busy(self, side: Side, member: int = 0) -> Iterator[None]:
        """Count the time inside the block as busy, however it ends.

        Args:
            side: "trainer" or "generator".
            member: the replica's number; 0 for the trainer.
        """
        self._advance()
        self._depth[side][member] += 1
        try:
            yield
        finally:
            self._advance()
            self._depth[side][member] -= 1

    def total(self) -> IdleShares:
        """Return what happened since `start`; work under way counts up to now. All zero before `start`."""
        self._advance()
        return IdleShares(
            wall_s=self._wall_s,
            trainer_busy_s=self._busy_s["trainer"],
            generator_busy_s=self._busy_s["generator"] / len(self._depth["generator"]),
            overlap_s=self._overlap_s,
        )

    def lap(self) -> IdleShares:
        """Return what happened since the last `lap` (or `start`), and begin the next one."""
        now = self.total()
        lap, self._lap_start = now._since(self._lap_start), now
        return lap

    def _advance(self) -> None:
        if self._last_s is None:
            return

        now = self._clock()
        passed_s = now - self._last_s
        assert passed_s >= 0, f"the clock went back from {self._last_s} to {now}"

        num_busy = {side: sum(depth > 0 for depth in members) for side, members in self._depth.items()}
        self._wall_s += passed_s
        self._overlap_s += passed_s if all(num_busy.values()) else 0.0
        for side, number in num_busy.items():
            self._busy_s[side] += passed_s * number
        self._last_s = now


class BusyWorker:
    """A generator replica whose `generate` calls count as busy time."""

    def __init__(self, worker: Worker, busy: BusyClock, replica: int) -> None:
        self.name = worker.name
        self._worker = worker
        self._busy = busy
        self._replica = replica

    async def call(self, method: str, *args: Any, deadline_s: float | None, **kwargs: Any) -> Any:  # noqa: ANN401
        """See `engine.workers.Worker`."""
        if method != "generate":
            return await self._worker.call(method, *args, deadline_s=deadline_s, **kwargs)

        with self._busy.busy("generator", self._replica):
            return await self._worker.call(method, *args, deadline_s=deadline_s, **kwargs)


class BusyTrainer:
    """A trainer whose steps count as busy time."""

    def __init__(self, trainer: Trainer, busy: BusyClock) -> None:
        self._trainer = trainer
        self._busy = busy

    async def step(self, batch: Batch, *, epoch: int, slot: int) -> StepResult:
        """See `trainers.base.Trainer`."""
        with self._busy.busy("trainer"):
            return await self._trainer.step(batch, epoch=epoch, slot=slot)

    async def watch(self) -> None:
        """See `trainers.base.Trainer`."""
        await self._trainer.watch()

    async def stop(self) -> None:
        """See `trainers.base.Trainer`."""
        await self._trainer.stop()
