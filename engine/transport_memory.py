"""Transport within one host's CPU memory: the segments themselves. Nothing is sent, a receiver copies and proves."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.buckets import BucketSpec
from engine.plan import Plan
from engine.segments import SegmentReader
from engine.transport import Deadline, Verifier, check_header, check_manifest, sealed_header
from engine.types import Manifest
from engine.views import memory_tensor


class SharedMemoryBuckets:
    """The sealed buckets in a run's folder, read-only. Also what senders of other transports read from.

    The segments are opened when they are first needed: the training ranks may create them later than this.
    """

    def __init__(self, plan: Plan, folder: Path, num_slots: int) -> None:
        """Args: plan, folder, num_slots: those of the `SnapshotWriter`s."""
        self.plan = plan
        self._folder, self._num_slots = folder, num_slots
        self._readers: dict[int, tuple[SegmentReader, torch.Tensor]] = {}

    def payload(self, manifest: Manifest, bucket_id: int) -> torch.Tensor:
        """A bucket's payload, uint8 [num_bytes], on the segment itself; see `SealedBuckets`."""
        bucket = self.plan.buckets[bucket_id]
        reader, memory = self._open(bucket.source_rank)
        self._check(reader, manifest, bucket)
        return memory[reader.payload(bucket_id, manifest.slot)]

    def check(self, manifest: Manifest, bucket_id: int) -> None:
        """Raise WeightTransferError unless a bucket is (still) sealed and of this version."""
        bucket = self.plan.buckets[bucket_id]
        self._check(self._open(bucket.source_rank)[0], manifest, bucket)

    def close(self) -> None:
        """Unmap the segments; payloads must be gone. Idempotent."""
        readers = [reader for reader, _ in self._readers.values()]
        self._readers = {}
        for reader in readers:
            reader.close()

    def _open(self, source_rank: int) -> tuple[SegmentReader, torch.Tensor]:
        if source_rank not in self._readers:
            reader = SegmentReader(self.plan, source_rank, self._folder, self._num_slots)
            self._readers[source_rank] = reader, memory_tensor(reader.memory)
        return self._readers[source_rank]

    def _check(self, reader: SegmentReader, manifest: Manifest, bucket: BucketSpec) -> None:
        reader.check_size()
        where = f"version {manifest.version}, bucket {bucket.id} of source rank {bucket.source_rank}"
        found = reader.header(bucket.id, manifest.slot)
        check_header(found, sealed_header(manifest, bucket), f"{where}, slot {manifest.slot}", peer=_name(bucket))


class SharedMemorySender:
    """A `BucketSender` that moves nothing: `SnapshotWriter` has put the buckets where receivers read them."""

    def __init__(self, buckets: SharedMemoryBuckets, source_rank: int) -> None:
        self._buckets, self._source_rank = buckets, source_rank

    def send(self, manifest: Manifest, *, timeout_s: float) -> int:
        """Check that every bucket of this rank is sealed and of this version; no byte leaves the process."""
        deadline = Deadline(timeout_s)
        check_manifest(manifest, self._buckets.plan.hash, self._buckets.plan.num_buckets)
        for bucket in self._buckets.plan.buckets_of_source(self._source_rank):
            deadline.check(f"version {manifest.version}, bucket {bucket.id}")
            self._buckets.check(manifest, bucket.id)
        return 0

    def close(self) -> None:
        """Nothing to give up: the buckets are their owner's."""


class SharedMemoryReceiver:
    """A `BucketReceiver` on the segments of this host."""

    def __init__(self, buckets: SharedMemoryBuckets, target_rank: int) -> None:
        self._buckets = buckets
        self.order = buckets.plan.buckets_of_target(target_rank)

    def fetch(self, manifest: Manifest, bucket_id: int, out: torch.Tensor, *, timeout_s: float) -> None:
        """Copy and hash a bucket chunk by chunk; see `BucketReceiver`."""
        bucket = self._buckets.plan.buckets[bucket_id]
        deadline = Deadline(timeout_s)
        verifier = Verifier(manifest, bucket, out, _name(bucket))
        payload = self._buckets.payload(manifest, bucket_id)
        for start, end in verifier.chunks():
            deadline.check(verifier.where, peer=_name(bucket))
            out[start:end].copy_(payload[start:end])
            verifier.update(start, end)
        self._buckets.check(manifest, bucket_id)  # names the version that was written over it meanwhile
        verifier.finish()

    def close(self) -> None:
        """Nothing to give up: the buckets are their owner's."""


def _name(bucket: BucketSpec) -> str:
    return f"trainer rank {bucket.source_rank}"
