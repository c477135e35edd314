"""Training rank side of a publish: pack the weights as they are right now into a slot of shared memory.

Invariant *untorn snapshot*: `write` is called after the optimizer step and returns before the next one; what is in the
slot then is the step's own, whatever happens to the parameters later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

from engine.plan import Plan
from engine.segments import SegmentWriter
from engine.views import BucketRuns, Chunks, LiveParams, memory_tensor


class SnapshotWriter:
    """Writes the buckets of one source rank, version after version.

    Usage::

        writer = SnapshotWriter(plan, rank, dict(model.named_parameters()), folder, num_slots)
        digests = writer.write(version=3, epoch=0, slot=1)  # {0: "9f...", 4: "03..."}, this rank's buckets
        writer.close()

    The views are made once. A parameter may get another storage between two calls (Megatron's DDP does that when it
    wraps the model); the views are then made again. The tensor objects in `params` must stay the model's own.
    """

    def __init__(
        self, plan: Plan, source_rank: int, params: Mapping[str, torch.Tensor], folder: Path, num_slots: int
    ) -> None:
        """Create this rank's segment and the views.

        Args:
            plan: the run's plan.
            source_rank: which rank of `plan.source` this is.
            params: its parameters by local name, exactly those of `plan.source.params[source_rank]`.
            folder: the run's folder of shared memory.
            num_slots: versions that the store can hold.

        Raises:
            WeightTransferError: a parameter is missing, too many, or of another shape or dtype; or the segment could
                not be created.
        """
        self._params = LiveParams(plan.source, source_rank, params)
        self._segment = SegmentWriter(plan, source_rank, folder, num_slots)
        self._runs = [BucketRuns.of(bucket, bucket.source_runs) for bucket in plan.buckets_of_source(source_rank)]
        self._param_views = self._view_params()
        memory = memory_tensor(self._segment.memory)
        self._payload_views = [
            [runs.payload_views(memory, self._segment.payload(runs.bucket.id, slot)) for runs in self._runs]
            for slot in range(num_slots)
        ]

    @torch.no_grad()
    def write(self, version: int, epoch: int, slot: int) -> dict[int, str]:
        """Copy the weights into a slot, cast to the wire dtype, and seal every bucket.

        Args:
            version: the weights' version.
            epoch: its epoch.
            slot: a slot that the publisher reserved; whoever still reads it sees that its content is gone.

        Returns:
            bucket id -> xxh3_128 of the payload (32 hex digits), for this rank's buckets.
        """
        if self._params.have_moved():
            self._param_views = self._view_params()

        digests: dict[int, str] = {}
        for runs, params, payload in zip(self._runs, self._param_views, self._payload_views[slot], strict=True):
            bucket = runs.bucket.id
            self._segment.begin(bucket, slot, epoch=epoch, version=version)
            digests[bucket] = self._pack(params, payload, runs.ends, self._segment.payload(bucket, slot))
            self._segment.seal(bucket, slot, epoch=epoch, version=version, digest=digests[bucket])
        return digests

    def close(self) -> None:
        """Unlink this rank's segment. Idempotent."""
        self._payload_views = []
        self._segment.close()

    def _view_params(self) -> list[Chunks]:
        return [self._params.views(runs.groups) for runs in self._runs]

    def _pack(self, params: Chunks, payload: Chunks, ends: tuple[int, ...], place: slice) -> str:
        """Copy one bucket chunk by chunk and hash every chunk while it is in the cache; return the digest."""
        digest = xxhash.xxh3_128()
        start = 0
        with memoryview(self._segment.memory)[place] as written:
            for sources, targets, end in zip(params, payload, ends, strict=True):
                torch._foreach_copy_(targets, sources)
                digest.update(written[start:end])
                start = end
        return digest.hexdigest()
