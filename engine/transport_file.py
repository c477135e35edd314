"""Transport through files: for restarts, late joiners, and hosts that share nothing faster than a file system.

Below a private folder (0700) written bytes have a folder of their own, a version has a manifest::

    epoch-0-written-5/source-00000.buckets   headers and payloads, laid out as in a segment of one slot
    epoch-0-written-5/source-00001.buckets
    epoch-0-version-5.json                   written last: a version is there if and only if this is
    epoch-0-version-6.json                   step 6 made no new bits: it names the bytes of 5

All files are 0600, written under another name (O_EXCL, O_NOFOLLOW), synced and renamed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.buckets import BucketSpec
from engine.plan import Plan
from engine.segments import BucketHeader, SegmentMap, WeightTransferError
from engine.shared_folder import check_private, private_folder
from engine.transport import (
    Deadline,
    SealedBuckets,
    TransportError,
    Verifier,
    check_header,
    check_manifest,
    chunk_bounds,
    place,
    sealed_header,
)
from engine.types import Manifest, WeightVersion

_MANIFEST = re.compile(r"epoch-(\d+)-version-(\d+)\.json")
_BYTES = re.compile(r"epoch-\d+-written-\d+")
_PARTIAL = ".partial"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class _MissingFileError(TransportError):
    """There is no such file."""


class FileSender:
    """A `BucketSender` of one source rank: writes its buckets of a version into one file."""

    def __init__(self, plan: Plan, source_rank: int, folder: Path, buckets: SealedBuckets) -> None:
        """Args: folder: private, on a file system that the receivers see."""
        self._plan, self._folder, self._buckets = plan, folder, buckets
        self._bucket_specs = plan.buckets_of_source(source_rank)
        self._map = SegmentMap.of(plan, source_rank, num_slots=1)

    def send(self, manifest: Manifest, *, timeout_s: float) -> int:
        """Write all buckets of this rank, unless they are there (a step that made no new bits); see `BucketSender`.

        When all source ranks have returned, one process calls `commit_version`.
        """
        deadline = Deadline(timeout_s)
        check_manifest(manifest, self._plan.hash, self._plan.num_buckets)
        with private_folder(self._folder) as root, suppress(FileExistsError):
            os.mkdir(_bytes_folder(manifest), 0o700, dir_fd=root)
        folder = self._folder / _bytes_folder(manifest)
        if _size(folder, self._map.file_name) is not None:
            self._check_written(folder / self._map.file_name, manifest)
            return 0

        with _new_file(folder, self._map.file_name) as file:
            for bucket in self._bucket_specs:
                self._write_bucket(file, manifest, bucket, deadline)
            os.ftruncate(file, self._map.num_bytes)
        return sum(bucket.num_bytes for bucket in self._bucket_specs)

    def close(self) -> None:
        """Nothing to give up: files stay until `remove_version`."""

    def _check_written(self, path: Path, manifest: Manifest) -> None:
        """Raise TransportError if the file is of another run: one that died before its commit, and was not swept."""
        with _old_file(path) as file:
            for bucket in self._bucket_specs:
                _check_header(file, self._map, manifest, bucket, f"{path}, bucket {bucket.id}")

    def _write_bucket(self, file: int, manifest: Manifest, bucket: BucketSpec, deadline: Deadline) -> None:
        where = place(manifest, bucket, f"file of source rank {bucket.source_rank}")
        payload = self._buckets.payload(manifest, bucket.id).cpu().numpy().data
        start = self._map.payload(bucket.id, slot=0).start
        _write(file, memoryview(sealed_header(manifest, bucket).pack()), self._map.header(bucket.id, slot=0))
        for chunk, end in chunk_bounds(len(payload)):
            deadline.check(where)
            _write(file, payload[chunk:end], start + chunk)


class FileReceiver:
    """A `BucketReceiver` that reads files. Any order will do."""

    def __init__(self, plan: Plan, target_rank: int, folder: Path) -> None:
        """Args: folder: where the `FileSender`s write."""
        self._plan, self._folder = plan, folder
        self.order = plan.buckets_of_target(target_rank)
        self._maps = {
            rank: SegmentMap.of(plan, rank, num_slots=1) for rank in {bucket.source_rank for bucket in self.order}
        }

    def fetch(self, manifest: Manifest, bucket_id: int, out: torch.Tensor, *, timeout_s: float) -> None:
        """Read and hash a bucket chunk by chunk; see `BucketReceiver`."""
        deadline = Deadline(timeout_s)
        check_manifest(manifest, self._plan.hash, self._plan.num_buckets)
        bucket = self._plan.buckets[bucket_id]
        segment = self._maps[bucket.source_rank]
        path = self._folder / _bytes_folder(manifest) / segment.file_name
        verifier = Verifier(manifest, bucket, out, str(path))
        with _old_file(path) as file:
            size = os.fstat(file).st_size
            if size != segment.num_bytes:
                raise TransportError(f"{verifier.where}: the file has {size} bytes, want {segment.num_bytes}")

            _check_header(file, segment, manifest, bucket, verifier.where)
            first = segment.payload(bucket_id, slot=0).start
            for start, end in verifier.chunks():
                deadline.check(verifier.where)
                _read_chunk(file, out[start:end], first + start, verifier.where)
                verifier.update(start, end)
        verifier.finish()

    def close(self) -> None:
        """Nothing to give up."""


def commit_version(plan: Plan, folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a version whose source ranks have all sent: from now on it is one.

    Raises:
        TransportError: a source rank's file is missing or of another size; all of them are named.
    """
    check_manifest(manifest, plan.hash, plan.num_buckets)
    problems: list[str] = []
    for rank in range(plan.source.num_ranks):
        segment = SegmentMap.of(plan, rank, num_slots=1)
        size = _size(folder / _bytes_folder(manifest), segment.file_name)
        if size != segment.num_bytes:
            problems.append(f"{segment.file_name} has {size} bytes, want {segment.num_bytes}")
    if problems:
        raise TransportError(f"version {manifest.version} in {folder}: {'; '.join(problems)}")

    text = json.dumps(asdict(manifest), sort_keys=True)
    with _new_file(folder, _manifest_name(manifest.epoch, manifest.version)) as file:
        _write(file, memoryview(text.encode()), 0)


def read_version(folder: Path, epoch: int, version: int) -> Manifest:
    """Return the manifest of a version.

    Raises:
        TransportError: it is not there, or no manifest.
    """
    path = folder / _manifest_name(epoch, version)
    with _old_file(path) as file, os.fdopen(os.dup(file), "rb") as stream:
        raw = stream.read()
    try:
        manifest = _manifest(json.loads(raw))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TransportError(f"{path} is no manifest: {error!r}") from error

    if (manifest.epoch, manifest.version) != (epoch, version):
        raise TransportError(f"{path} is of epoch {manifest.epoch}, version {manifest.version}")

    return manifest


def newest_version(folder: Path) -> Manifest | None:
    """Return the manifest of the newest whole version, by (epoch, version); None if there is none."""
    found = _versions(folder)
    return read_version(folder, *max(found)) if found else None


def remove_version(folder: Path, epoch: int, version: int) -> None:
    """Remove a version, its manifest first; its bytes go unless another version names them.

    Raises:
        TransportError: it is not there.
    """
    written = _bytes_folder(read_version(folder, epoch, version))
    with private_folder(folder) as root:
        os.unlink(_manifest_name(epoch, version), dir_fd=root)
    if written not in _named_bytes(folder):
        shutil.rmtree(folder / written)


def sweep_uncommitted(folder: Path) -> list[str]:
    """Remove bytes that no version names, as a dead run leaves them, and return their folders' names.

    For the owner, before it writes: bytes that are being written are not named either.
    """
    named = _named_bytes(folder)
    with private_folder(folder) as root:
        names = os.listdir(root)
        for name in names:
            if name.endswith(_PARTIAL):
                os.unlink(name, dir_fd=root)
    left = sorted(name for name in names if _BYTES.fullmatch(name) and name not in named)
    for name in left:
        shutil.rmtree(folder / name)
    return left


def _named_bytes(folder: Path) -> set[str]:
    return {_bytes_folder(read_version(folder, *version)) for version in _versions(folder)}


def _versions(folder: Path) -> list[tuple[int, int]]:
    with private_folder(folder) as root:
        names = [_MANIFEST.fullmatch(name) for name in os.listdir(root)]
    return [(int(match[1]), int(match[2])) for match in names if match is not None]


def _manifest(fields: Mapping[str, Any]) -> Manifest:
    """Build a manifest from its JSON, whose keys are strings."""
    return Manifest(
        epoch=int(fields["epoch"]),
        version=WeightVersion(int(fields["version"])),
        written_version=WeightVersion(int(fields["written_version"])),
        plan_hash=str(fields["plan_hash"]),
        slot=int(fields["slot"]),
        digests={int(bucket): str(digest) for bucket, digest in fields["digests"].items()},
    )


def _check_header(file: int, segment: SegmentMap, manifest: Manifest, bucket: BucketSpec, where: str) -> None:
    wanted = sealed_header(manifest, bucket)
    raw = os.pread(file, len(wanted.pack()), segment.header(bucket.id, slot=0))
    try:
        found = BucketHeader.unpack(raw)
    except (WeightTransferError, struct.error) as error:
        raise TransportError(f"{where}: {error}") from error

    check_header(found, wanted, where)


def _bytes_folder(manifest: Manifest) -> str:
    return f"epoch-{manifest.epoch}-written-{manifest.written_version}"


def _manifest_name(epoch: int, version: int) -> str:
    return f"epoch-{epoch}-version-{version}.json"


def _size(folder: Path, name: str) -> int | None:
    """Size of a private file; None if it is not there."""
    try:
        with _old_file(folder / name) as file:
            return os.fstat(file).st_size
    except _MissingFileError:
        return None


@contextmanager
def _old_file(path: Path) -> Iterator[int]:
    """Open a private file of ours for reading.

    Raises:
        TransportError: it is not there (`_MissingFileError`) or not private.
    """
    with private_folder(path.parent) as folder:
        try:
            file = os.open(path.name, _OLD, dir_fd=folder)
        except FileNotFoundError as error:
            raise _MissingFileError(f"{path}: {error.strerror}") from error
        except OSError as error:
            raise TransportError(f"{path}: {error.strerror}") from error

    try:
        check_private(path, os.fstat(file), is_folder=False)
        yield file
    finally:
        os.close(file)


@contextmanager
def _new_file(folder: Path, name: str) -> Iterator[int]:
    """Make a file that appears under its name when it is whole, and not at all after an error."""
    partial = f".{name}.{secrets.token_hex(8)}{_PARTIAL}"
    with private_folder(folder) as folder_fd:
        file = os.open(partial, _NEW, 0o600, dir_fd=folder_fd)
        try:
            yield file
            os.fsync(file)
            os.rename(partial, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            os.fsync(folder_fd)
        except BaseException as error:
            with suppress(FileNotFoundError):
                os.unlink(partial, dir_fd=folder_fd)
            if isinstance(error, OSError):
                raise TransportError(f"{folder / name}: {error.strerror}") from error
            raise
        finally:
            os.close(file)


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        num_written = os.pwrite(file, data, offset)
        data, offset = data[num_written:], offset + num_written


def _read_chunk(file: int, out: torch.Tensor, offset: int, where: str) -> None:
    """Fill `out`, a chunk, from the file."""
    host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=torch.uint8)
    rest = host.numpy().data
    while rest:
        num_read = os.preadv(file, [rest], offset)
        if num_read == 0:
            raise TransportError(f"{where}: the file ends at byte {offset}, {len(rest)} more were wanted")

        rest, offset = rest[num_read:], offset + num_read
    if host is not out:
        out.copy_(host)
