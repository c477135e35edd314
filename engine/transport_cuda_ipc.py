"""Transport within one host's GPU memory: a segment in device memory, mapped by the other processes through CUDA IPC.

API (torch 2.13): `torch.multiprocessing.reductions.reduce_tensor` exports a CUDA tensor (cudaIpcGetMemHandle below it)
and `rebuild_cuda_tensor` maps it in another process. Both are what `torch.multiprocessing.Queue` does with a tensor; we
carry the handle in a private file instead, as JSON, so that nothing is unpickled. One export serves one reader: torch
counts them.

The segment is laid out as in shared memory, headers included. Hashing is the host's: a receiver copies every chunk back
over the bus. It has not run: the tests need a CUDA device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine.buckets import BucketSpec
from engine.plan import Plan
from engine.segments import BucketHeader, BucketState, SegmentMap
from engine.shared_folder import check_private, private_folder
from engine.transport import (
    Deadline,
    SealedBuckets,
    TransportError,
    Verifier,
    check_header,
    check_manifest,
    chunk_bounds,
    sealed_header,
)
from engine.types import Manifest

_HANDLE_FIELDS = (  # the arguments of rebuild_cuda_tensor behind device, in its order
    "handle",
    "storage_bytes",
    "storage_offset",
    "requires_grad",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)


class CudaIpcSender:
    """A `BucketSender` that owns the device segment of one source rank.

    It reads sealed buckets (of host memory, or of this device) and writes them to the segment; receivers on this host
    copy from there, device to device.
    """

    def __init__(
        self,
        plan: Plan,
        source_rank: int,
        folder: Path,
        num_slots: int,
        buckets: SealedBuckets,
        *,
        device: torch.device,
        readers: Iterable[str],
    ) -> None:
        """Allocate the segment and write a handle for every reader.

        Args:
            plan, source_rank, num_slots: as for `SegmentWriter`.
            folder: the run's private folder.
            buckets: where the sealed buckets are.
            device: a CUDA device.
            readers: names of the receivers ("generator-0-rank-1"); a late joiner gets its handle by `share`.
        """
        self._plan, self._buckets, self._folder = plan, buckets, folder
        self._source_rank = source_rank
        self._map = SegmentMap.of(plan, source_rank, num_slots)
        self._memory = torch.zeros(self._map.num_bytes, dtype=torch.uint8, device=device)
        self._shared: list[str] = []
        for reader in readers:
            self.share(reader)

    def share(self, reader: str) -> None:
        """Write a handle for one more reader."""
        name = _handle_name(self._source_rank, reader)
        handle = json.dumps(_export(self._memory)).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with private_folder(self._folder) as folder, open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
            self._shared.append(name)
            file.write(handle)

    def send(self, manifest: Manifest, *, timeout_s: float) -> int:
        """Copy all buckets of this rank into the segment's slot; see `BucketSender`."""
        deadline = Deadline(timeout_s)
        check_manifest(manifest, self._plan.hash, self._plan.num_buckets)
        num_bytes = 0
        for bucket in self._plan.buckets_of_source(self._source_rank):
            deadline.check(f"version {manifest.version}, bucket {bucket.id}")
            names = manifest.plan_hash, manifest.epoch, manifest.written_version, bucket.id, bucket.num_bytes
            self._write_header(manifest.slot, BucketHeader(BucketState.WRITING, *names))
            self._memory[self._map.payload(bucket.id, manifest.slot)].copy_(self._buckets.payload(manifest, bucket.id))
            _synchronize(self._memory)  # sealed means whole, for a reader with another stream too
            self._write_header(manifest.slot, sealed_header(manifest, bucket))
            num_bytes += bucket.num_bytes
        _synchronize(self._memory)
        return num_bytes

    def close(self) -> None:
        """Remove the handles and give up the segment; receivers must be closed. Idempotent."""
        with private_folder(self._folder) as folder:
            for name in self._shared:
                os.unlink(name, dir_fd=folder)
        self._shared = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _write_header(self, slot: int, header: BucketHeader) -> None:
        raw = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        start = self._map.header(header.bucket_id, slot)
        self._memory[start : start + len(raw)].copy_(raw)


class CudaIpcReceiver:
    """A `BucketReceiver` that maps the source ranks' device segments."""

    def __init__(self, plan: Plan, target_rank: int, folder: Path, num_slots: int, *, reader: str) -> None:
        """Args: reader: the name under which the senders share their segments with this one; opened when needed."""
        self._plan, self._folder, self._num_slots, self._reader = plan, folder, num_slots, reader
        self.order = plan.buckets_of_target(target_rank)
        self._segments: dict[int, tuple[SegmentMap, torch.Tensor]] = {}

    def fetch(self, manifest: Manifest, bucket_id: int, out: torch.Tensor, *, timeout_s: float) -> None:
        """Copy a bucket device to device and hash it on the host, chunk by chunk; see `BucketReceiver`."""
        deadline = Deadline(timeout_s)
        check_manifest(manifest, self._plan.hash, self._plan.num_buckets)
        bucket = self._plan.buckets[bucket_id]
        verifier = Verifier(manifest, bucket, out, f"device segment of source rank {bucket.source_rank}")
        segment, memory = self._open(bucket.source_rank)
        self._check(manifest, bucket, segment, memory, verifier.where)
        payload = memory[segment.payload(bucket_id, manifest.slot)]
        for start, end in chunk_bounds(bucket.num_bytes):
            deadline.check(verifier.where)
            out[start:end].copy_(payload[start:end])
            verifier.update(start, end)
        self._check(manifest, bucket, segment, memory, verifier.where)
        verifier.finish()

    def close(self) -> None:
        """Unmap the segments. Idempotent."""
        self._segments = {}

    def _check(
        self, manifest: Manifest, bucket: BucketSpec, segment: SegmentMap, memory: torch.Tensor, where: str
    ) -> None:
        wanted = sealed_header(manifest, bucket)
        start = segment.header(bucket.id, manifest.slot)
        raw = memory[start : start + len(wanted.pack())].cpu().numpy().tobytes()
        check_header(BucketHeader.unpack(raw), wanted, where)

    def _open(self, source_rank: int) -> tuple[SegmentMap, torch.Tensor]:
        if source_rank not in self._segments:
            segment = SegmentMap.of(self._plan, source_rank, self._num_slots)
            path = self._folder / _handle_name(source_rank, self._reader)
            memory = _attach(_read_handle(path), segment.num_bytes)
            self._segments[source_rank] = segment, memory
        return self._segments[source_rank]


def _handle_name(source_rank: int, reader: str) -> str:
    return f"source-{source_rank:05d}.{reader}.cuda"


def _read_handle(path: Path) -> dict[str, Any]:
    with private_folder(path.parent) as folder:
        try:
            file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            raise TransportError(f"{path}: {error.strerror}") from error

    with open(file, "rb") as stream:
        check_private(path, os.fstat(file), is_folder=False)
        raw = stream.read()
    try:
        handle = dict(json.loads(raw))
    except (ValueError, TypeError) as error:
        raise TransportError(f"{path} is no handle of a device segment: {error}") from error

    missing = {"device_uuid", "num_bytes", *_HANDLE_FIELDS} - handle.keys()
    if missing:
        raise TransportError(f"{path} is no handle of a device segment: {sorted(missing)} are missing")

    return handle


def _export(memory: torch.Tensor) -> dict[str, Any]:
    """Return what another process needs to map a CUDA tensor, as JSON can carry it."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(memory)  # type: ignore[no-untyped-call]
    _, _, _, _, _, _, device, *rest = arguments  # class, size, stride, offset, storage class, dtype: ours to know
    fields = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in zip(_HANDLE_FIELDS, rest, strict=True)
    }
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"device_uuid": uuid, "num_bytes": memory.numel(), **fields}


def _attach(handle: dict[str, Any], num_bytes: int) -> torch.Tensor:
    """Map the tensor of another process: uint8 [num_bytes] on the same physical device, whatever its number here.

    Raises:
        TransportError: its size is not the plan's, or this process does not see that device.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    if handle["num_bytes"] != num_bytes:
        raise TransportError(f"the device segment has {handle['num_bytes']} bytes, the plan says {num_bytes}")

    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if handle["device_uuid"] not in uuids:
        raise TransportError(f"the segment is on device {handle['device_uuid']}, this process sees {uuids}")

    fields = [bytes.fromhex(handle[name]) if isinstance(handle[name], str) else handle[name] for name in _HANDLE_FIELDS]
    device = uuids.index(handle["device_uuid"])
    tensor: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor, (num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8, device, *fields
    )
    return tensor


def _synchronize(memory: torch.Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)
