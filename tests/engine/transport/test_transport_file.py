"""Versions as files: whole or not there, private, and what is damaged is named."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.segments import SegmentMap, WeightTransferError
from engine.transport import BucketReceiver, BucketSender, TransportError
from engine.transport_file import (
    FileReceiver,
    FileSender,
    commit_version,
    newest_version,
    read_version,
    remove_version,
    sweep_uncommitted,
)
from engine.transport_memory import SharedMemoryBuckets
from engine.types import Manifest, WeightVersion

World = Any  # conftest's
MakeWorld = Callable[..., World]


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(tp=2, bucket_bytes=1000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "versions"
    path.mkdir(mode=0o700)
    return path


def sealed(world: World) -> SharedMemoryBuckets:
    """What the training ranks have sealed."""
    return SharedMemoryBuckets(world.plan, world.folder, world.num_slots)


def send(world: World, folder: Path, manifest: Manifest) -> int:
    """All source ranks write, then the version is committed."""
    senders: list[BucketSender] = [FileSender(world.plan, rank, folder, sealed(world)) for rank in range(2)]
    num_bytes = sum(sender.send(manifest, timeout_s=5) for sender in senders)
    commit_version(world.plan, folder, manifest)
    return num_bytes


def fetch(world: World, folder: Path, manifest: Manifest, bucket_id: int) -> torch.Tensor:
    """One bucket."""
    receiver: BucketReceiver = FileReceiver(world.plan, 0, folder)
    out = torch.zeros(world.plan.buckets[bucket_id].num_bytes, dtype=torch.uint8)
    receiver.fetch(manifest, bucket_id, out, timeout_s=5)
    return out


def bytes_file(world: World, folder: Path, bucket_id: int) -> tuple[Path, slice]:
    """The file of version 1 that holds a bucket, and where its payload is."""
    segment = SegmentMap.of(world.plan, world.plan.buckets[bucket_id].source_rank, num_slots=1)
    return folder / "epoch-0-written-1" / segment.file_name, segment.payload(bucket_id, 0)


def test_a_late_joiner_reads_the_newest_whole_version(world: World, folder: Path) -> None:
    assert newest_version(folder) is None
    first = world.write(1, slot=0)
    assert send(world, folder, first) == world.plan.num_bytes
    world.train(seed=2)
    second = world.write(2, slot=1)
    send(world, folder, second)

    assert newest_version(folder) == second
    assert read_version(folder, 0, 1) == first
    for bucket in world.plan.buckets:
        found = fetch(world, folder, second, bucket.id)
        assert torch.equal(found, sealed(world).payload(second, bucket.id))


def test_everything_is_private_and_nothing_partial_is_left(world: World, folder: Path) -> None:
    send(world, folder, world.write(1, slot=0))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {
        "epoch-0-written-1": 0o700,
        "source-00000.buckets": 0o600,
        "source-00001.buckets": 0o600,
        "epoch-0-version-1.json": 0o600,
    }

    folder.chmod(0o755)
    with pytest.raises(WeightTransferError, match="has mode 755, a private folder has 700"):
        newest_version(folder)


def test_a_version_without_new_bits_writes_no_bytes(world: World, folder: Path) -> None:
    first = world.write(1, slot=0)
    send(world, folder, first)
    alias = dataclasses.replace(first, version=WeightVersion(2))
    assert send(world, folder, alias) == 0
    remove_version(folder, 0, 1)
    assert newest_version(folder) == alias
    fetch(world, folder, alias, 0)
    remove_version(folder, 0, 2)
    assert list(folder.iterdir()) == []


def test_a_sender_that_dies_leaves_no_version(world: World, folder: Path) -> None:
    """Rank 1 breaks off in the middle: no file of its own, no commit, and the next start sweeps what rank 0 wrote."""
    manifest = world.write(1, slot=0)
    FileSender(world.plan, 0, folder, sealed(world)).send(manifest, timeout_s=5)
    broken = sealed(world)
    last = world.plan.buckets_of_source(1)[-1].id

    class Dying:
        def payload(self, manifest: Manifest, bucket_id: int) -> torch.Tensor:
            if bucket_id == last:
                raise KeyboardInterrupt
            return broken.payload(manifest, bucket_id)

    with pytest.raises(KeyboardInterrupt):
        FileSender(world.plan, 1, folder, Dying()).send(manifest, timeout_s=5)
    with pytest.raises(TransportError, match=r"version 1 in .*: source-00001.buckets has None bytes, want \d+"):
        commit_version(world.plan, folder, manifest)
    assert newest_version(folder) is None

    world.train(seed=7)
    other = world.write(1, slot=0)  # the run that comes after it makes other bits of the same version
    with pytest.raises(TransportError, match=r"source-00000.buckets, bucket 0: digest is [0-9a-f]{32}, want"):
        FileSender(world.plan, 0, folder, sealed(world)).send(other, timeout_s=5)
    (folder / ".epoch-0-version-1.json.00.partial").touch()
    assert sweep_uncommitted(folder) == ["epoch-0-written-1"]
    assert list(folder.iterdir()) == []


def test_a_flipped_bit_is_named(world: World, folder: Path) -> None:
    manifest = world.write(1, slot=0)
    send(world, folder, manifest)
    path, payload = bytes_file(world, folder, 3)
    raw = bytearray(path.read_bytes())
    raw[payload.stop - 1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(TransportError, match=rf"version 1, bucket 3 .*{path.name}: the payload hashes to"):
        fetch(world, folder, manifest, 3)


def test_a_truncated_file_another_version_and_no_header_are_named(world: World, folder: Path) -> None:
    manifest = world.write(1, slot=0)
    send(world, folder, manifest)
    path, _ = bytes_file(world, folder, 0)
    whole = path.read_bytes()
    os.truncate(path, 100)
    with pytest.raises(TransportError, match=rf"bucket 0 .*: the file has 100 bytes, want {len(whole)}"):
        fetch(world, folder, manifest, 0)

    path.write_bytes(bytes(len(whole)))
    with pytest.raises(TransportError, match=r"bucket 0 .*: no bucket header"):
        fetch(world, folder, manifest, 0)

    world.train(seed=2)
    second = world.write(2, slot=1)
    send(world, folder, second)
    other = folder / "epoch-0-written-2" / path.name
    path.write_bytes(other.read_bytes())
    with pytest.raises(TransportError, match=r"bucket 0 .*: version is 2, want 1; digest is"):
        fetch(world, folder, manifest, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"epoch-0-version-1.json is no manifest: JSONDecodeError"),
        ("[]", r"epoch-0-version-1.json is no manifest: TypeError"),
        ("{}", r"epoch-0-version-1.json is no manifest: KeyError\('epoch'\)"),
    ],
)
def test_a_damaged_manifest_is_named(world: World, folder: Path, text: str, message: str) -> None:
    send(world, folder, world.write(1, slot=0))
    (folder / "epoch-0-version-1.json").write_text(text)
    with pytest.raises(TransportError, match=message):
        newest_version(folder)


def test_links_are_not_followed(world: World, folder: Path, tmp_path: Path) -> None:
    manifest = world.write(1, slot=0)
    send(world, folder, manifest)
    path, _ = bytes_file(world, folder, 0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransportError, match=r"source-00000.buckets: Too many levels of symbolic links"):
        fetch(world, folder, manifest, 0)
