"""How buckets travel: what every transport offers a training rank and a generator rank. No torch at import.

A version is made once, by `SnapshotWriter` into shared memory. A transport carries its sealed buckets from there to a
generator rank: through the same memory, a joint process group, a chain of replicas, files, or CUDA IPC. Both sides
hold the plan; the manifest of the version reaches the receiving side with the request to fetch it.

Sending side, once a version and source rank: `sender.send(manifest, timeout_s=60)`. Receiving side::

    for bucket in receiver.order:
        receiver.fetch(manifest, bucket.id, out[bucket.id], timeout_s=10)  # uint8, verified when it returns

Every call has a deadline, every failure is a `TransportError` that names version, bucket, peer and both values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol

import xxhash

from engine.buckets import BucketSpec
from engine.segments import BucketHeader, BucketState, WeightTransferError
from engine.types import Manifest

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 1 << 20
"""Moved and hashed in one go: small enough to be still in the cache when it is hashed."""


class TransportError(WeightTransferError):
    """A transfer that failed, or bytes that are not the manifest's.

    Attributes:
        peer: who the other side was ("generator-1 rank 0"); None where there is none (a file).
    """

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class SealedBuckets(Protocol):
    """The buckets of a version where they were sealed: what a sender reads from."""

    def payload(self, manifest: Manifest, bucket_id: int) -> torch.Tensor:
        """Return a bucket's payload, uint8 [num_bytes], without a copy. It is not hashed here; the receiver does that.

        Raises:
            WeightTransferError: the bucket is not there, not sealed, or of another version.
        """
        ...


class BucketSender(Protocol):
    """One training rank's end of a transport to one replica (or, of a relay, to the first one)."""

    def send(self, manifest: Manifest, *, timeout_s: float) -> int:
        """Deliver all buckets of this source rank, or make them available where receivers take them themselves.

        That it returns says that the bytes were taken, not that they were proven: a receiver that dies after its last
        byte is found by its missing report (`engine.membership`) or acknowledgement.

        Args:
            manifest: of a committed version that is held for this replica.
            timeout_s: longest time for all of it.

        Returns:
            Payload bytes that left this process.

        Raises:
            TransportError: a peer is gone or too slow. The sender is then of no more use; the version stays sealed.
        """
        ...

    def close(self) -> None:
        """Give up the connection. Idempotent."""
        ...


class BucketReceiver(Protocol):
    """One generator rank's end of a transport."""

    @property
    def order(self) -> tuple[BucketSpec, ...]:
        """This rank's buckets in the order in which they must be fetched, once each a version."""
        ...

    def fetch(self, manifest: Manifest, bucket_id: int, out: torch.Tensor, *, timeout_s: float) -> None:
        """Write a bucket's payload into `out` and prove it.

        Args:
            manifest: the version.
            bucket_id: the next one of `order`.
            out: uint8 [num_bytes], dense. Its content is undefined after an error.
            timeout_s: longest time for this bucket.

        Raises:
            WeightTransferError: not there, truncated, of another version, or it hashes to something else.
            TransportError: of these, the peer is gone or too slow.
        """
        ...

    def close(self) -> None:
        """Give up the connection. Idempotent."""
        ...


class Deadline:
    """A point in time that several waits share.

    Example: `deadline = Deadline(10)`; a wait of 7 s later `deadline.remaining_s` is 3.
    """

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"a timeout must be > 0 s, got {timeout_s}")

        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(self._end - time.monotonic(), 0.0)

    def check(self, what: str, *, peer: str | None = None) -> None:
        """Raise TransportError if it has passed."""
        if self.remaining_s == 0:
            raise TransportError(f"{what}: not done within {self.timeout_s:g} s", peer=peer)


class Verifier:
    """Hashes one bucket's payload while it arrives.

    Usage: `for start, end in verifier.chunks(): ...  # fill out[start:end]` then `verifier.update(start, end)`, and
    `verifier.finish()` after the last.
    """

    def __init__(self, manifest: Manifest, bucket: BucketSpec, out: torch.Tensor, peer: str) -> None:
        assert str(out.dtype) == "torch.uint8", f"bucket {bucket.id}: out is {out.dtype}, want torch.uint8"
        assert out.shape == (bucket.num_bytes,), f"bucket {bucket.id}: out has {out.shape}, want {bucket.num_bytes}"
        assert out.is_contiguous(), f"bucket {bucket.id}: out is not dense"
        self.where, self._peer = place(manifest, bucket, peer), peer
        self._wanted = manifest.digests[bucket.id]
        self._digest = xxhash.xxh3_128()
        self._out, self._num_bytes = out, bucket.num_bytes
        self._hashed = 0

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Start and end of every chunk, in order."""
        return chunk_bounds(self._num_bytes)

    def update(self, start: int, end: int) -> None:
        """Hash `out[start:end]`, which has arrived; chunks come in order. A device's chunk is copied to the host."""
        assert start == self._hashed, f"{self.where}: chunk at {start} after {self._hashed} bytes"
        self._digest.update(self._out[start:end].cpu().numpy().data)
        self._hashed = end

    def finish(self) -> None:
        """Raise TransportError unless all of it has arrived and hashes to what the manifest says."""
        if self._hashed != self._num_bytes:
            raise TransportError(f"{self.where}: {self._hashed} bytes arrived, want {self._num_bytes}", peer=self._peer)

        found = self._digest.hexdigest()
        if found != self._wanted:
            raise TransportError(f"{self.where}: the payload hashes to {found}, want {self._wanted}", peer=self._peer)


def chunk_bounds(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and end of every chunk of a payload. Example: 2.5 MiB are (0, 1), (1, 2), (2, 2.5) MiB."""
    for start in range(0, num_bytes, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, num_bytes)


def sealed_header(manifest: Manifest, bucket: BucketSpec) -> BucketHeader:
    """The header that a bucket of this version has, wherever it is."""
    names = manifest.plan_hash, manifest.epoch, manifest.written_version, bucket.id, bucket.num_bytes
    return BucketHeader(BucketState.SEALED, *names, manifest.digests[bucket.id])


def check_header(found: BucketHeader, wanted: BucketHeader, where: str, *, peer: str | None = None) -> None:
    """Raise TransportError unless a header is the wanted one; every field that differs is named with both values."""
    if found == wanted:
        return

    differing = [
        f"{field.name} is {getattr(found, field.name)!s}, want {getattr(wanted, field.name)!s}"
        for field in fields(BucketHeader)
        if getattr(found, field.name) != getattr(wanted, field.name)
    ]
    raise TransportError(f"{where}: {'; '.join(differing)}", peer=peer)


def check_manifest(manifest: Manifest, plan_hash: str, num_buckets: int) -> None:
    """Raise TransportError unless a manifest is of this plan and names every bucket of it."""
    what = f"manifest of version {manifest.version}"
    if manifest.plan_hash != plan_hash:
        raise TransportError(f"{what}: plan {manifest.plan_hash}, this side has {plan_hash}")

    wanted = set(range(num_buckets))
    missing, extra = sorted(wanted - manifest.digests.keys()), sorted(manifest.digests.keys() - wanted)
    if missing or extra:
        raise TransportError(f"{what}: buckets missing {missing}, unknown {extra}")


def place(manifest: Manifest, bucket: BucketSpec, peer: str) -> str:
    """How an error names a bucket on its way."""
    return f"version {manifest.version}, bucket {bucket.id} of source rank {bucket.source_rank}, from {peer}"
