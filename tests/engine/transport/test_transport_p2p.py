"""Point to point over gloo: what arrives is proven, who is killed or stalls costs its own group and nobody else."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from engine.membership import Membership, MembershipBoard
from engine.plan import Plan
from engine.transport import TransportError
from engine.transport_group import Communicator, GroupSpec, Rendezvous
from engine.transport_memory import SharedMemoryBuckets
from engine.transport_p2p import PointToPointReceiver, PointToPointSender, transfer_order
from engine.types import Manifest

World = Any  # conftest's
MakeWorld = Callable[..., World]
MakePeer = Callable[..., Any]
Put = Callable[[Manifest], None]
Digest = Callable[[World, Manifest, int], str]


def group(
    meet: Rendezvous, plan: Plan, rank: int, replica: str = "generator-0", epoch: int = 0, backend: str = "gloo"
) -> Communicator:
    """Join the group of the trainer and a replica."""
    spec = GroupSpec.between("trainer", plan.source.num_ranks, replica, plan.target.num_ranks, epoch=epoch)
    return Communicator(meet, spec, rank, timeout_s=60, backend=backend)


def buckets_of(world: World) -> SharedMemoryBuckets:
    """What the training ranks have sealed."""
    return SharedMemoryBuckets(world.plan, world.folder, world.num_slots)


def test_every_rank_receives_its_buckets(
    make_world: MakeWorld, make_peer: MakePeer, meet: Rendezvous, put_manifest: Put, digest: Digest
) -> None:
    """Two training ranks (threads here) and two generator ranks (processes)."""
    world = make_world(tp=2, target_tp=2, bucket_bytes=1000)
    manifest = world.write(1, slot=0)
    put_manifest(manifest)
    MembershipBoard(meet).announce(Membership(epoch=0, replicas=("generator-0",)))
    peers = [make_peer(world, replica="generator-0", rank=rank) for rank in range(2)]

    def send(rank: int) -> int:
        sender = PointToPointSender(world.plan, rank, group(meet, world.plan, rank), buckets_of(world))
        return sender.send(manifest, timeout_s=60)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(send, range(2))) == [world.plan.source_bytes(rank) for rank in range(2)]
    for rank, peer in enumerate(peers):
        assert peer.event() == {"epoch": 0, "digest": digest(world, manifest, rank), "error": None, "bytes_sent": 0}


def test_the_order_has_every_bucket_once_and_serves_all_targets_at_a_time(make_world: MakeWorld) -> None:
    plan = make_world(pp=2, target_tp=2, bucket_bytes=1000).plan
    order = transfer_order(plan)
    assert sorted(bucket.id for bucket in order) == list(range(plan.num_buckets))
    pairs = [(bucket.source_rank, bucket.target_rank) for bucket in order]
    assert pairs[:8] == [(0, 0), (1, 1), (0, 1), (1, 0)] * 2


@pytest.mark.parametrize(("number", "timeout_s"), [(signal.SIGKILL, 30), (signal.SIGSTOP, 2)])
def test_a_receiver_that_dies_or_stalls_in_the_middle_costs_its_own_group_only(
    make_world: MakeWorld,
    make_peer: MakePeer,
    meet: Rendezvous,
    put_manifest: Put,
    digest: Digest,
    number: signal.Signals,
    timeout_s: float,
) -> None:
    """The sender's error names version, bucket and peer within its timeout; the other replica gets this version and
    the next."""
    world = make_world(bucket_bytes=1000)
    board = MembershipBoard(meet)
    members = Membership(epoch=0, replicas=("generator-0", "generator-1"))
    board.announce(members)
    lost = make_peer(world, replica="generator-0", pause_after=5)
    other = make_peer(world, replica="generator-1", num_epochs=2)
    first = world.write(1, slot=0)
    put_manifest(first)
    senders = [
        PointToPointSender(world.plan, 0, group(meet, world.plan, 0, replica), buckets_of(world))
        for replica in members.replicas
    ]

    signalled = lost.signal_when_paused(number)
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"version 1, bucket \d+ to generator-0 rank 0: ") as error:
        senders[0].send(first, timeout_s=timeout_s)
    assert time.monotonic() - start < 8  # at once, or after the 2 s
    assert error.value.peer == "generator-0 rank 0"
    signalled.join()

    assert senders[1].send(first, timeout_s=15) == world.plan.num_bytes
    assert other.event()["digest"] == digest(world, first, 0)

    members = members.without(["generator-0"])
    world.train(seed=2)
    second = world.write(2, slot=1)
    put_manifest(second)
    board.announce(members)
    sender = PointToPointSender(world.plan, 0, group(meet, world.plan, 0, "generator-1", epoch=1), buckets_of(world))
    assert sender.send(second, timeout_s=15) == world.plan.num_bytes
    assert other.event() == {"epoch": 1, "digest": digest(world, second, 0), "error": None, "bytes_sent": 0}


def test_a_sender_that_is_killed_in_the_middle_is_named(
    make_world: MakeWorld, make_peer: MakePeer, meet: Rendezvous, put_manifest: Put
) -> None:
    world = make_world(bucket_bytes=1000)
    manifest = world.write(1, slot=0)
    put_manifest(manifest)
    peer = make_peer(world, role="sender", replica="generator-0", pause_after=3)
    receiver = PointToPointReceiver(world.plan, 0, group(meet, world.plan, 1))
    killed = peer.signal_when_paused(signal.SIGKILL)
    with pytest.raises(TransportError, match=r"version 1, bucket 2 .* from trainer rank 0: 0 of \d+ bytes") as error:
        fetch_all(receiver, manifest)
    killed.join()
    assert error.value.peer == "trainer rank 0"
    with pytest.raises(TransportError, match="the group was given up"):
        fetch_all(receiver, manifest)


def test_whoever_does_not_come_is_waited_for_no_longer_than_said(make_world: MakeWorld, meet: Rendezvous) -> None:
    spec = GroupSpec.between("trainer", 1, "generator-0", 1, epoch=0)
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"not all of trainer rank 0, generator-0 rank 0 came within 0\.5 s"):
        Communicator(meet, spec, 0, timeout_s=0.5)
    assert time.monotonic() - start < 3


def test_a_rendezvous_listens_on_the_loopback_only(meet: Rendezvous) -> None:
    port = int(meet.address.rpartition(":")[2])
    listening = [
        connection.laddr.ip for connection in psutil.Process().net_connections("tcp") if connection.laddr.port == port
    ]
    assert set(listening) == {"127.0.0.1"}


class Damaged:
    """Sealed buckets of which one is not what the manifest says."""

    def __init__(self, world: World, bucket_id: int, damage: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._buckets, self._bucket_id, self._damage = buckets_of(world), bucket_id, damage

    def payload(self, manifest: Manifest, bucket_id: int) -> torch.Tensor:
        payload = self._buckets.payload(manifest, bucket_id).clone()
        return self._damage(payload) if bucket_id == self._bucket_id else payload


def flipped(payload: torch.Tensor) -> torch.Tensor:
    payload[-1] ^= 1
    return payload


def fetch_all(receiver: PointToPointReceiver, manifest: Manifest) -> list[TransportError]:
    """Fetch every bucket; return the errors after which the stream went on."""
    errors: list[TransportError] = []
    for bucket in receiver.order:
        try:
            receiver.fetch(manifest, bucket.id, torch.zeros(bucket.num_bytes, dtype=torch.uint8), timeout_s=5)
        except TransportError as error:
            if "hashes to" not in str(error):
                raise
            errors.append(error)
    return errors


def send_and_fetch(
    world: World, meet: Rendezvous, sent: Manifest, wanted: Manifest, buckets: object = None
) -> tuple[list[TransportError], BaseException | None]:
    """Both sides in this process; return what the receiver and the sender say."""

    def send() -> int:
        sealed: Any = buckets_of(world) if buckets is None else buckets
        return PointToPointSender(world.plan, 0, group(meet, world.plan, 0), sealed).send(sent, timeout_s=5)

    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send)
        receiver = PointToPointReceiver(world.plan, 0, group(meet, world.plan, 1))
        try:
            errors = fetch_all(receiver, wanted)
        except TransportError as error:
            errors = [error]
        receiver.close()
    return errors, sender.exception()


def test_a_flipped_bit_is_found_and_the_stream_goes_on(make_world: MakeWorld, meet: Rendezvous) -> None:
    world = make_world(bucket_bytes=1000)
    manifest = world.write(1, slot=0)
    errors, sender_error = send_and_fetch(world, meet, manifest, manifest, Damaged(world, 3, flipped))
    (error,) = map(str, errors)
    wanted = manifest.digests[3]
    assert error.startswith("version 1, bucket 3 of source rank 0, from trainer rank 0: the payload hashes to ")
    assert error.endswith(f"want {wanted}")
    assert sender_error is None


def test_a_truncated_bucket_is_named_with_both_sizes(make_world: MakeWorld, meet: Rendezvous) -> None:
    world = make_world(bucket_bytes=1000)
    manifest = world.write(1, slot=0)
    size = world.plan.buckets[3].num_bytes
    (error,), sender_error = send_and_fetch(
        world, meet, manifest, manifest, Damaged(world, 3, lambda payload: payload[:-4])
    )
    assert f"bucket 3 of source rank 0, from trainer rank 0: 0 of {size} bytes arrived" in str(error)
    assert f"num_bytes is {size - 4}, want {size}" in str(error)
    assert "version 1, bucket 3 to generator-0 rank 0" in str(sender_error)


def test_a_bucket_of_another_version_or_plan_is_named(make_world: MakeWorld, meet: Rendezvous) -> None:
    world = make_world(bucket_bytes=1000)
    first = world.write(1, slot=0)
    world.train(seed=2)
    second = world.write(2, slot=1)
    (error,), sender_error = send_and_fetch(world, meet, first, second)
    assert "version 2, bucket 0 of source rank 0, from trainer rank 0" in str(error)
    assert "version is 1, want 2; digest is" in str(error)
    assert isinstance(sender_error, TransportError)

    receiver = PointToPointReceiver(world.plan, 0, group(Rendezvous.host(), one_rank(world.plan), 0))
    with pytest.raises(TransportError, match=r"manifest of version 2: plan 0{32}, this side has"):
        fetch_all(receiver, dataclasses.replace(second, plan_hash="0" * 32))


def one_rank(plan: Plan) -> Any:  # noqa: ANN401 - a plan's sizes, for a group of one
    class Sizes:
        source = dataclasses.make_dataclass("Side", ["num_ranks"])(1)
        target = dataclasses.make_dataclass("Side", ["num_ranks"])(0)

    return Sizes


def test_buckets_out_of_order_are_named(make_world: MakeWorld, meet: Rendezvous) -> None:
    world = make_world(bucket_bytes=1000)
    manifest = world.write(1, slot=0)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(group, meet, world.plan, 0)
        receiver = PointToPointReceiver(world.plan, 0, group(meet, world.plan, 1))
        sender = PointToPointSender(world.plan, 0, joined.result(), buckets_of(world))
        sending = pool.submit(sender.send, manifest, timeout_s=5)
        out = torch.zeros(world.plan.buckets[1].num_bytes, dtype=torch.uint8)
        with pytest.raises(TransportError, match="bucket_id is 0, want 1"):
            receiver.fetch(manifest, 1, out, timeout_s=5)
        assert isinstance(sending.exception(), TransportError)


@pytest.mark.gpu(reason="NCCL moves the memory of devices, one a process")
@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGSTOP])
def test_nccl_delivers_or_fails_within_the_timeout(
    make_world: MakeWorld,
    make_peer: MakePeer,
    meet: Rendezvous,
    put_manifest: Put,
    digest: Digest,
    number: signal.Signals | None,
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ranks on one device")

    world = make_world(bucket_bytes=1000)
    manifest = world.write(1, slot=0)
    put_manifest(manifest)
    MembershipBoard(meet).announce(Membership(epoch=0, replicas=("generator-0",)))
    peer = make_peer(world, replica="generator-0", backend="nccl", device=1, pause_after=5 if number else 0)
    sender = PointToPointSender(world.plan, 0, group(meet, world.plan, 0, backend="nccl"), buckets_of(world))
    if number is None:
        assert sender.send(manifest, timeout_s=30) == world.plan.num_bytes
        assert peer.event()["digest"] == digest(world, manifest, 0)
        return

    signalled = peer.signal_when_paused(number)
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"version 1, bucket \d+ to generator-0 rank 0: "):
        sender.send(manifest, timeout_s=10)
    assert time.monotonic() - start < 20
    signalled.join()
