"""The Megatron trainer as the driver sees it: a handle a rank, every call to all of them at once. No torch, no ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.families import megatron_coordinates
from engine.types import FloatArray, WeightVersion
from engine.workers import Worker, call_all
from trainers.types import Batch, MicroBatch, RankInfo, RankStepResult, StepResult, TrainerSpec

if TYPE_CHECKING:
    from engine.plan import Plan
    from trainers.base import Trainer


class MegatronTrainer:
    """A `trainers.base.Trainer` over `MegatronRank`s.

    A call that fails on one rank fails as a whole, see `engine.workers.call_all`: the other ranks may wait for the
    failed one in a collective.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        ranks: Sequence[Worker],
        *,
        master_addr: str = "127.0.0.1",
        start_deadline_s: float = 300.0,
        step_deadline_s: float = 600.0,
        disk_deadline_s: float = 1800.0,
        stop_deadline_s: float = 30.0,
    ) -> None:
        """Args:
        spec: what the ranks were made with.
        ranks: handles in rank order.
        master_addr: address of rank 0's machine at which the ranks meet.
        start_deadline_s, step_deadline_s: for `start` and `attach`, and for one `step`, `snapshot` or `logprobs`.
        disk_deadline_s: for `save`, `load` and `export`.
        stop_deadline_s: for `stop`.
        """
        assert len(ranks) == spec.num_ranks, (len(ranks), spec.num_ranks)
        self._spec = spec
        self._ranks = tuple(ranks)
        self._dp_ranks = tuple(
            megatron_coordinates(rank, tp=spec.tp, pp=spec.pp, dp=spec.dp).data for rank in range(spec.num_ranks)
        )
        self._master_addr = master_addr
        self._start_deadline_s = start_deadline_s
        self._step_deadline_s = step_deadline_s
        self._disk_deadline_s = disk_deadline_s
        self._stop_deadline_s = stop_deadline_s

    async def start(self) -> tuple[RankInfo, ...]:
        """Bring all ranks up and load the initial weights."""
        port = await self._ranks[0].call("listen", self._master_addr, deadline_s=self._start_deadline_s)
        return await self._all("start", self._master_addr, port, deadline_s=self._start_deadline_s)

    async def attach(self, plan: Plan, folder: str, num_slots: int) -> None:
        """Make every rank create its segment in `folder`."""
        await self._all("attach", plan, folder, num_slots, deadline_s=self._start_deadline_s)

    async def snapshot(self, version: WeightVersion, *, epoch: int, slot: int) -> Mapping[int, str]:
        """Write the weights as they are; return bucket id -> digest over all ranks."""
        return _merged(await self._all("snapshot", version, epoch, slot, deadline_s=self._step_deadline_s))

    async def step(self, batch: Batch, *, epoch: int, slot: int) -> StepResult:
        """Train on one batch and snapshot the new version into `slot`.

        Args:
            batch: not empty: a step without a gradient is the scheduler's business.
            epoch, slot: where the snapshot goes.
        """
        assert not batch.is_empty, f"step {batch.step}: an empty batch must not reach the trainer"
        assert len(batch.micro_batches) == self._spec.dp, (len(batch.micro_batches), self._spec.dp)
        results: tuple[RankStepResult, ...] = await call_all(
            self._ranks,
            "step",
            batch.step,
            batch.num_loss_tokens,
            epoch,
            slot,
            deadline_s=self._step_deadline_s,
            each=[(batch.micro_batches[dp_rank],) for dp_rank in self._dp_ranks],
        )
        metrics = results[0].metrics
        assert all(result.metrics == metrics for result in results), [result.metrics for result in results]
        return StepResult(
            step=batch.step,
            version=WeightVersion(batch.step + 1),
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            lr=metrics.lr,
            entropy=metrics.entropy,
            clip_fraction=metrics.clip_fraction,
            ratio_max=metrics.ratio_max,
            generator_kl=metrics.generator_kl,
            num_tokens=metrics.num_tokens,
            digests=_merged([result.digests for result in results]),
            skipped=False,
            timings_ms={name: max(result.timings_ms[name] for result in results) for name in results[0].timings_ms},
            peak_memory_bytes=tuple(result.peak_memory_bytes for result in results),
        )

    async def logprobs(self, micro_batches: tuple[tuple[MicroBatch, ...], ...]) -> tuple[tuple[FloatArray, ...], ...]:
        """Return the trainer's logprob of every label, float32 [T] by [DP rank][micro-batch]."""
        assert len(micro_batches) == self._spec.dp, (len(micro_batches), self._spec.dp)
        shares = [(micro_batches[dp_rank],) for dp_rank in self._dp_ranks]
        answers = await call_all(self._ranks, "logprobs", deadline_s=self._step_deadline_s, each=shares)
        reported = {dp: answer for dp, answer in zip(self._dp_ranks, answers, strict=True) if answer is not None}
        return tuple(reported[dp] for dp in range(self._spec.dp))

    async def save(self, folder: str) -> None:
        """Write a checkpoint into an existing, empty folder."""
        await self._all("save", folder, deadline_s=self._disk_deadline_s)

    async def load(self, folder: str) -> None:
        """Go on from what `save` wrote."""
        await self._all("load", folder, deadline_s=self._disk_deadline_s)

    async def export(self, folder: str, *, dtype: str | None = None) -> None:
        """Write a Hugging Face folder into an existing, empty folder."""
        await self._all("export", folder, dtype, deadline_s=self._disk_deadline_s)

    async def watch(self) -> None:
        """Return after `stop`; raise as soon as a rank dies, also while it has nothing to do."""
        await call_all(self._ranks, "watch", deadline_s=None, grace_s=0.0)

    async def stop(self) -> None:
        """End the ranks' work."""
        await self._all("stop", deadline_s=self._stop_deadline_s)

    async def _all(self, method: str, *args: object, deadline_s: float) -> tuple[Any, ...]:
        """Call one method with the same arguments on all ranks."""
        return await call_all(self._ranks, method, *args, deadline_s=deadline_s)


def _merged(digests: Sequence[Mapping[int, str]]) -> dict[int, str]:
    """Join the ranks' digests; every bucket has one writer."""
    merged: dict[int, str] = {}
    for own in digests:
        assert not merged.keys() & own.keys(), f"buckets {sorted(merged.keys() & own.keys())} have two writers"
        merged.update(own)
    return merged


if TYPE_CHECKING:
    _IS_A_TRAINER: type[Trainer] = MegatronTrainer
