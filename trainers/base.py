"""The Trainer protocol: what the driver asks of whatever trains. Also the errors that a trainer raises by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from engine.types import FloatArray, WeightVersion
from trainers.types import Batch, MicroBatch, RankInfo, StepResult

if TYPE_CHECKING:
    from engine.plan import Plan


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient norm is inf or NaN. Raised on every rank, before the optimizer step."""


class Trainer(Protocol):
    """Trains a model on batches and snapshots every version of its weights. Driver side; every method is awaited.

    Order of calls: `start`, `attach`, `snapshot` of the first version, then `step`s; the rest in between.
    """

    async def start(self) -> tuple[RankInfo, ...]:
        """Bring all ranks up and load the initial weights."""
        ...

    async def attach(self, plan: Plan, folder: str, num_slots: int) -> None:
        """Make every rank ready to write snapshots of its buckets into `folder`."""
        ...

    async def snapshot(self, version: WeightVersion, *, epoch: int, slot: int) -> Mapping[int, str]:
        """Write the weights as they are (the first version, or after a resume); return bucket id -> digest."""
        ...

    async def step(self, batch: Batch, *, epoch: int, slot: int) -> StepResult:
        """Train on one batch and snapshot the new version into `slot` before anything else happens to the weights.

        Raises:
            NonFiniteLoss: (as the cause) the weights are as they were.
        """
        ...

    async def logprobs(self, micro_batches: tuple[tuple[MicroBatch, ...], ...]) -> tuple[tuple[FloatArray, ...], ...]:
        """Return the trainer's logprob of every label, float32 [T] by [DP rank][micro-batch]."""
        ...

    async def save(self, folder: str) -> None:
        """Write weights, optimizer and step counters into an existing, empty folder, for `load`."""
        ...

    async def load(self, folder: str) -> None:
        """Go on from what `save` wrote; the next step is bitwise the one that an uninterrupted run would take."""
        ...

    async def export(self, folder: str, *, dtype: str | None = None) -> None:
        """Write a Hugging Face folder; `dtype` None keeps the trainer's own."""
        ...

    async def watch(self) -> None:
        """Return after `stop`; raise as soon as a rank dies, also between two steps."""
        ...

    async def stop(self) -> None:
        """End the ranks' work; safe to call more than once."""
        ...
