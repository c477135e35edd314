"""Shared memory behind the protocol, and the landing of a host that has none in common with the trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.landing import Landing
from engine.receiver import Receiver
from engine.segments import SegmentMap, WeightTransferError
from engine.transport import BucketReceiver, BucketSender, Deadline, SealedBuckets, TransportError, Verifier
from engine.transport_group import Communicator, GroupSpec, Rendezvous
from engine.transport_memory import SharedMemoryBuckets, SharedMemoryReceiver, SharedMemorySender
from engine.transport_p2p import PointToPointReceiver, PointToPointSender
from engine.types import Manifest

World = Any  # conftest's
MakeWorld = Callable[..., World]


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(tp=2, bucket_bytes=1000)


@pytest.fixture
def buckets(world: World) -> Iterator[SharedMemoryBuckets]:
    """What the training ranks have sealed."""
    found = SharedMemoryBuckets(world.plan, world.folder, world.num_slots)
    yield found
    found.close()


def fetch(receiver: BucketReceiver, manifest: Manifest, bucket_id: int, size: int) -> torch.Tensor:
    """One bucket's payload."""
    out = torch.zeros(size, dtype=torch.uint8)
    receiver.fetch(manifest, bucket_id, out, timeout_s=5)
    return out


def test_what_is_fetched_is_what_was_sealed(world: World, buckets: SharedMemoryBuckets) -> None:
    manifest = world.write(1, slot=1)
    sender: BucketSender = SharedMemorySender(buckets, 0)
    receiver: BucketReceiver = SharedMemoryReceiver(buckets, 0)
    sealed: SealedBuckets = buckets
    assert sender.send(manifest, timeout_s=5) == 0
    assert [bucket.id for bucket in receiver.order] == list(range(world.plan.num_buckets))
    for bucket in receiver.order:
        out = fetch(receiver, manifest, bucket.id, bucket.num_bytes)
        assert torch.equal(out, sealed.payload(manifest, bucket.id))


def test_a_flipped_bit_is_named(world: World, buckets: SharedMemoryBuckets) -> None:
    manifest = world.write(1, slot=0)
    bucket = world.plan.buckets[4]
    segment = SegmentMap.of(world.plan, bucket.source_rank, world.num_slots)
    with (world.folder / segment.file_name).open("r+b") as file:
        file.seek(segment.payload(4, 0).start)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 128]))
    with pytest.raises(TransportError, match=r"version 1, bucket 4 of source rank \d, from .*: the payload hashes to"):
        fetch(SharedMemoryReceiver(buckets, 0), manifest, 4, bucket.num_bytes)


def test_another_version_a_truncated_file_and_a_manifest_that_forgot_are_named(
    world: World, buckets: SharedMemoryBuckets
) -> None:
    manifest = world.write(1, slot=0)
    receiver, sender = SharedMemoryReceiver(buckets, 0), SharedMemorySender(buckets, 0)
    world.train(seed=9)
    world.write(2, slot=0)
    with pytest.raises(TransportError, match=r"bucket 0 of source rank 0, slot 0: version is 2, want 1; digest is"):
        fetch(receiver, manifest, 0, world.plan.buckets[0].num_bytes)
    with pytest.raises(TransportError, match="version is 2, want 1"):
        sender.send(manifest, timeout_s=5)

    os.truncate(world.folder / "source-00000.buckets", 64)
    with pytest.raises(WeightTransferError, match="truncated to 64 bytes, the plan says"):
        fetch(receiver, manifest, 0, world.plan.buckets[0].num_bytes)


def test_a_version_that_is_written_over_while_it_is_copied_is_named(
    world: World, buckets: SharedMemoryBuckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = world.write(1, slot=0)
    update = Verifier.update

    def update_while_the_writer_goes_on(self: Verifier, start: int, end: int) -> None:
        update(self, start, end)
        world.write(2, slot=0)

    monkeypatch.setattr(Verifier, "update", update_while_the_writer_goes_on)
    with pytest.raises(TransportError, match="version is 2, want 1"):
        fetch(SharedMemoryReceiver(buckets, 0), manifest, 0, world.plan.buckets[0].num_bytes)


def test_a_deadline_must_lie_ahead() -> None:
    with pytest.raises(ValueError, match=r"a timeout must be > 0 s, got 0"):
        Deadline(0)
    deadline = Deadline(1e-9)
    with pytest.raises(TransportError, match=r"bucket 3: not done within 1e-09 s"):
        deadline.check("bucket 3")


def test_a_receiver_applies_what_landed(make_world: MakeWorld, tmp_path: Path) -> None:
    """Two training ranks -> gloo -> a landing in another folder -> the unchanged receiver; a damaged bucket stays
    unsealed, so that the receiver refuses the version."""
    world = make_world(tp=2, bucket_bytes=1000)
    manifest = world.write(1, slot=0)
    local = tmp_path / "other-host"
    local.mkdir(mode=0o700)
    landing = Landing(world.plan, local, world.num_slots)
    receiver = Receiver(world.plan, 0, world.targets[0], local, world.num_slots)
    with pytest.raises(WeightTransferError, match="no bucket header"):
        receiver.prepare(manifest)

    assert land(world, landing, manifest) == world.plan.num_bytes
    receiver.prepare(manifest)
    receiver.apply(manifest)
    assert receiver.version == 1
    assert world.target_holds(seed=world.seed)
    receiver.close()
    landing.close()
    assert list(local.iterdir()) == []


def land(world: World, landing: Landing, manifest: Manifest) -> int:
    """Send from threads, pull here."""
    meet = Rendezvous.host()
    spec = GroupSpec.between("trainer", 2, "generator-0", 1, epoch=0)

    def send(rank: int) -> int:
        sealed = SharedMemoryBuckets(world.plan, world.folder, world.num_slots)
        group = Communicator(meet, spec, rank, timeout_s=10)
        return PointToPointSender(world.plan, rank, group, sealed).send(manifest, timeout_s=10)

    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(send, rank) for rank in range(2)]
        transport = PointToPointReceiver(world.plan, 0, Communicator(meet, spec, 2, timeout_s=10))
        num_bytes = landing.pull(manifest, transport, timeout_s=10)
        assert sum(each.result() for each in sending) == num_bytes
    return num_bytes
