"""The store of a host that shares no memory with the training ranks: what arrives lies in segments of its own.

A `Receiver` reads them as it reads the training ranks' own, so that versions, proofs and the flip are the same
everywhere.
"""

from __future__ import annotations

from pathlib import Path

from engine.plan import Plan
from engine.segments import SegmentWriter
from engine.transport import BucketReceiver, Deadline
from engine.types import Manifest
from engine.views import memory_tensor


class Landing:
    """Segments that a transport fills instead of a `SnapshotWriter`.

    Usage::

        landing = Landing(plan, folder, num_slots)
        num_bytes = landing.pull(manifest, transport, timeout_s=60)  # while requests run
        receiver.prepare(manifest)  # engine.receiver.Receiver(plan, rank, params, folder, num_slots)

    One a replica and host: it holds room for all target ranks of the replica.
    """

    def __init__(self, plan: Plan, folder: Path, num_slots: int) -> None:
        """Create a segment for every source rank.

        Args:
            plan: the run's plan.
            folder: private, of this host; a `RunSegments` makes one.
            num_slots: that of the training ranks: a version lies in the slot that its manifest names.

        Raises:
            WeightTransferError: see `SegmentWriter`.
        """
        self._writers: dict[int, SegmentWriter] = {}
        try:
            for rank in range(plan.source.num_ranks):
                self._writers[rank] = SegmentWriter(plan, rank, folder, num_slots)
        except BaseException:
            self.close()
            raise

    def pull(self, manifest: Manifest, transport: BucketReceiver, *, timeout_s: float) -> int:
        """Fetch all buckets of the transport's rank; every one is sealed as soon as it is proven.

        Returns:
            Payload bytes.

        Raises:
            WeightTransferError: see `BucketReceiver.fetch`; buckets that are not proven stay WRITING.
        """
        deadline = Deadline(timeout_s)
        names = {"epoch": manifest.epoch, "version": manifest.written_version}
        for bucket in transport.order:
            deadline.check(f"version {manifest.version}, bucket {bucket.id}")
            writer = self._writers[bucket.source_rank]
            writer.begin(bucket.id, manifest.slot, **names)
            out = memory_tensor(writer.memory)[writer.payload(bucket.id, manifest.slot)]
            transport.fetch(manifest, bucket.id, out, timeout_s=max(deadline.remaining_s, 1e-3))
            writer.seal(bucket.id, manifest.slot, **names, digest=manifest.digests[bucket.id])
        return sum(bucket.num_bytes for bucket in transport.order)

    def close(self) -> None:
        """Unlink the segments; tensors on them must be gone. Idempotent."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}
