"""Shared memory that holds weight versions: one file a source rank, versioned slots, a header before every bucket.

Every source rank has one file (0600) in the run's folder with `num_slots` slots; a slot holds all buckets of that rank,
each a header and its payload. The rank that creates it unlinks it. Files are mapped by us: Python 3.11's
`multiprocessing.shared_memory` registers on attach too, and the tracker of a receiver that dies would unlink the
publisher's live segments.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import xxhash

from engine.plan import Plan
from engine.shared_folder import RunSegments, WeightTransferError, check_private, check_space, private_folder

__all__ = [
    "BucketHeader",
    "BucketState",
    "RunSegments",
    "SegmentMap",
    "SegmentReader",
    "SegmentWriter",
    "WeightTransferError",
    "digest_of",
    "store_bytes",
]

_ALIGNMENT = 64  # a cache line: payloads start on one, so that any dtype can be viewed there
_MAGIC = b"ASYNCRL1"
_FORMAT_VERSION = 1
_HEADER = struct.Struct("<8sII16sqqQQ16s")
_HEADER_BYTES = 128


class BucketState(IntEnum):
    """Written into a bucket's header: WRITING before the first byte of its payload, SEALED after the last."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """What stands before a bucket's payload.

    Attributes:
        state: whether the payload is whole.
        plan_hash: the plan that cut it, 32 hex digits.
        epoch, version: whose weights they are.
        bucket_id: which bucket of the plan.
        num_bytes: size of the payload.
        digest: xxh3_128 of the payload, 32 hex digits; zeros unless SEALED.
    """

    state: BucketState
    plan_hash: str
    epoch: int
    version: int
    bucket_id: int
    num_bytes: int
    digest: str = "0" * 32

    def pack(self) -> bytes:
        """The header as bytes."""
        numbers = self.epoch, self.version, self.bucket_id, self.num_bytes
        plan_hash, digest = bytes.fromhex(self.plan_hash), bytes.fromhex(self.digest)
        return _HEADER.pack(_MAGIC, _FORMAT_VERSION, self.state, plan_hash, *numbers, digest)

    @classmethod
    def unpack(cls, raw: bytes) -> BucketHeader:
        """Read a header.

        Raises:
            WeightTransferError: these bytes are no header, or one of another format.
        """
        magic, format_version, state, plan_hash, epoch, version, bucket_id, num_bytes, digest = _HEADER.unpack(raw)
        if (magic, format_version) != (_MAGIC, _FORMAT_VERSION) or state not in list(BucketState):
            raise WeightTransferError(
                f"no bucket header: magic {magic!r} format {format_version} state {state}, "
                f"want {_MAGIC!r} format {_FORMAT_VERSION}"
            )

        names = plan_hash.hex(), epoch, version, bucket_id, num_bytes, digest.hex()
        return cls(BucketState(state), *names)


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """Where everything is in the file of one source rank. Both sides compute it from the plan.

    Attributes:
        file_name: inside the run's folder.
        num_slots: versions that fit.
        slot_bytes: distance between slots.
        headers: bucket id -> offset of its header within a slot; the payload follows `_HEADER_BYTES` later.
        sizes: bucket id -> bytes of its payload.
    """

    file_name: str
    num_slots: int
    slot_bytes: int
    headers: dict[int, int]
    sizes: dict[int, int]

    @classmethod
    def of(cls, plan: Plan, source_rank: int, num_slots: int) -> SegmentMap:
        """Lay out the file of one source rank."""
        headers: dict[int, int] = {}
        sizes: dict[int, int] = {}
        end = 0
        for bucket in plan.buckets_of_source(source_rank):
            headers[bucket.id], sizes[bucket.id] = end, bucket.num_bytes
            end += _aligned(_HEADER_BYTES + bucket.num_bytes)
        return cls(f"source-{source_rank:05d}.buckets", num_slots, end, headers, sizes)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.num_slots * self.slot_bytes

    def header(self, bucket_id: int, slot: int) -> int:
        """Offset of a bucket's header in the file."""
        assert 0 <= slot < self.num_slots, f"slot {slot} is not in [0, {self.num_slots})"
        return slot * self.slot_bytes + self.headers[bucket_id]

    def payload(self, bucket_id: int, slot: int) -> slice:
        """Where a bucket's payload is in the file."""
        start = self.header(bucket_id, slot) + _HEADER_BYTES
        return slice(start, start + self.sizes[bucket_id])


def store_bytes(plan: Plan, num_slots: int) -> int:
    """Return the shared memory that a run needs for `num_slots` versions, headers included."""
    return sum(SegmentMap.of(plan, rank, num_slots).num_bytes for rank in range(plan.source.num_ranks))


class SegmentWriter:
    """The file of one source rank, created and unlinked by that rank.

    Usage, for every bucket of a version: `begin`, fill `payload`, `seal`.
    """

    def __init__(self, plan: Plan, source_rank: int, folder: Path, num_slots: int) -> None:
        """Create the file with all its pages reserved, so that a full store is an error here and not a signal later.

        Raises:
            WeightTransferError: the folder is not private to this user, the file exists, or there is not enough space.
        """
        self._map = SegmentMap.of(plan, source_rank, num_slots)
        self._plan_hash = plan.hash
        self._path = folder / self._map.file_name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with private_folder(folder) as folder_fd:
            try:
                file = os.open(self._map.file_name, flags, 0o600, dir_fd=folder_fd)
            except FileExistsError:
                raise WeightTransferError(f"{self._path} exists: source rank {source_rank} is already there") from None

        try:
            _reserve(file, self._path, self._map.num_bytes)
            self._memory = mmap.mmap(file, max(self._map.num_bytes, 1))
        except BaseException:
            self._path.unlink()
            raise
        finally:
            os.close(file)

    @property
    def memory(self) -> mmap.mmap:
        """The mapped file, writable; take payloads out of it with `payload`."""
        return self._memory

    def payload(self, bucket_id: int, slot: int) -> slice:
        """Where a bucket's payload is in `memory`."""
        return self._map.payload(bucket_id, slot)

    def begin(self, bucket_id: int, slot: int, *, epoch: int, version: int) -> None:
        """Mark the bucket as WRITING: whoever still reads the slot sees that it is gone."""
        self._write_header(bucket_id, slot, BucketState.WRITING, epoch, version)

    def seal(self, bucket_id: int, slot: int, *, epoch: int, version: int, digest: str) -> None:
        """Mark the bucket as SEALED with the digest of its payload (xxh3_128, 32 hex digits)."""
        self._write_header(bucket_id, slot, BucketState.SEALED, epoch, version, digest)

    def close(self) -> None:
        """Unlink the file and unmap it; tensors on it must be gone. Idempotent."""
        self._path.unlink(missing_ok=True)
        self._memory.close()

    def _write_header(
        self, bucket_id: int, slot: int, state: BucketState, epoch: int, version: int, digest: str = "0" * 32
    ) -> None:
        size = self._map.sizes[bucket_id]
        header = BucketHeader(state, self._plan_hash, epoch, version, bucket_id, size, digest).pack()
        start = self._map.header(bucket_id, slot)
        self._memory[start : start + len(header)] = header


class SegmentReader:
    """The file of one source rank, mapped read-only by a receiver. Its death unlinks nothing."""

    def __init__(self, plan: Plan, source_rank: int, folder: Path, num_slots: int) -> None:
        """Map the file.

        Raises:
            WeightTransferError: it is missing, not a private file of this user, or not of the size that the plan gives.
        """
        self._map = SegmentMap.of(plan, source_rank, num_slots)
        self._path = folder / self._map.file_name
        with private_folder(folder) as folder_fd:
            try:
                file = os.open(self._map.file_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
            except OSError as error:
                raise WeightTransferError(f"{self._path} of source rank {source_rank}: {error.strerror}") from error

        try:
            check_private(self._path, os.fstat(file), is_folder=False)
            size = os.fstat(file).st_size
            if size != max(self._map.num_bytes, 1):
                raise WeightTransferError(f"{self._path} has {size} bytes, the plan says {self._map.num_bytes}")

            self._file: int | None = os.dup(file)
            self._memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        finally:
            os.close(file)

    @property
    def memory(self) -> mmap.mmap:
        """The mapped file, read-only."""
        return self._memory

    def payload(self, bucket_id: int, slot: int) -> slice:
        """Where a bucket's payload is in `memory`."""
        return self._map.payload(bucket_id, slot)

    def check_size(self) -> None:
        """Raise WeightTransferError if the file was truncated: reading behind its end would be a signal."""
        assert self._file is not None, f"{self._path} is closed"
        size = os.fstat(self._file).st_size
        if size != max(self._map.num_bytes, 1):
            raise WeightTransferError(
                f"{self._path} was truncated to {size} bytes, the plan says {self._map.num_bytes}"
            )

    def header(self, bucket_id: int, slot: int) -> BucketHeader:
        """Read a bucket's header.

        Raises:
            WeightTransferError: there is none.
        """
        start = self._map.header(bucket_id, slot)
        try:
            return BucketHeader.unpack(self._memory[start : start + _HEADER.size])
        except WeightTransferError as error:
            raise WeightTransferError(f"{self._path}, bucket {bucket_id}, slot {slot}: {error}") from None

    def close(self) -> None:
        """Unmap the file; tensors on it must be gone. Idempotent."""
        self._memory.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def digest_of(payload: memoryview) -> str:
    """Return xxh3_128 of a payload, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(payload)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _reserve(file: int, path: Path, num_bytes: int) -> None:
    try:
        os.posix_fallocate(file, 0, max(num_bytes, 1))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise

        check_space(path.parent, num_bytes)
        raise WeightTransferError(f"{path}: no space for {num_bytes:,} bytes of weight versions") from error
