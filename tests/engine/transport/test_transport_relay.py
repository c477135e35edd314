"""Relay: the trainer sends each byte once, whoever is lost is named, nobody behind the gap hangs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from engine.membership import Membership, MembershipBoard, Outcome
from engine.relay import Meeting, links, open_relay_sender
from engine.transport import TransportError
from engine.transport_group import Rendezvous
from engine.transport_memory import SharedMemoryBuckets
from engine.transport_p2p import PointToPointSender, transfer_order
from engine.types import Manifest

World = Any  # conftest's
MakeWorld = Callable[..., World]
MakePeer = Callable[..., Any]
Put = Callable[[Manifest], None]
Digest = Callable[[World, Manifest, int], str]

REPLICAS = ("generator-0", "generator-1")
STALL_S = 2.0  # generous: a live replica must not look like a stalled one on a busy machine
HEADER_BYTES = 80


@pytest.fixture
def board(meet: Rendezvous) -> MembershipBoard:
    return MembershipBoard(meet)


class Chain:
    """The trainer's end of a relay, and the replicas behind it."""

    def __init__(self, world: World, meet: Rendezvous, board: MembershipBoard, put: Put, make_peer: MakePeer) -> None:
        self.world, self.meet, self.board, self.put, self.make_peer = world, meet, board, put, make_peer
        self.peers: dict[str, Any] = {}
        self.senders: list[PointToPointSender] = []

    def start(self, replica: str, **spec: object) -> None:
        """Start a replica's process."""
        self.peers[replica] = self.make_peer(self.world, replica=replica, relay=True, stall_s=STALL_S, **spec)

    def write(self, version: int) -> Manifest:
        """Make a version and tell the replicas."""
        self.world.train(seed=version)
        manifest: Manifest = self.world.write(version, slot=version % 2)
        self.put(manifest)
        return manifest

    def send(self, members: Membership, manifest: Manifest, *, buckets: object = None) -> int:
        """Announce the epoch and send a version."""
        self.board.announce(members)
        sealed: Any = SharedMemoryBuckets(self.world.plan, self.world.folder, self.world.num_slots)
        meeting = Meeting(rendezvous=self.meet, timeout_s=60)
        self.senders.append(open_relay_sender(self.world.plan, 0, members, meeting, buckets or sealed))
        return self.senders[-1].send(manifest, timeout_s=15)


@pytest.fixture
def chain(
    make_world: MakeWorld, meet: Rendezvous, board: MembershipBoard, put_manifest: Put, make_peer: MakePeer
) -> Chain:
    return Chain(make_world(bucket_bytes=1000), meet, board, put_manifest, make_peer)


def test_the_trainer_sends_each_byte_once(chain: Chain, digest: Digest) -> None:
    """Three processes: trainer, replica 0, replica 1. Replica 0 forwards one copy, the last one nothing."""
    for replica in REPLICAS:
        chain.start(replica)
    manifest = chain.write(1)
    members = Membership(epoch=0, replicas=REPLICAS)
    assert chain.send(members, manifest) == chain.world.plan.num_bytes

    whole = chain.world.plan.num_bytes + HEADER_BYTES * chain.world.plan.num_buckets
    assert chain.senders[0].bytes_sent == whole
    wanted = digest(chain.world, manifest, 0)
    first, last = (chain.peers[replica].event() for replica in REPLICAS)
    assert first == {"epoch": 0, "digest": wanted, "error": None, "bytes_sent": whole}
    assert last == {"epoch": 0, "digest": wanted, "error": None, "bytes_sent": 0}
    reports = chain.board.collect(0, 1, ["generator-0 rank 0", "generator-1 rank 0"], timeout_s=5)
    assert reports == {f"{replica} rank 0": Outcome(member=f"{replica} rank 0") for replica in REPLICAS}


def test_a_killed_replica_is_dropped_and_the_chain_is_rebuilt_without_it(chain: Chain, digest: Digest) -> None:
    """The first of two is killed in the middle: the one behind it does not hang and has everything one epoch later."""
    chain.start("generator-0", pause_after=9)
    chain.start("generator-1", num_epochs=2, timeout_s=30)
    first = chain.write(1)
    members = Membership(epoch=0, replicas=REPLICAS)
    killed = chain.peers["generator-0"].signal_when_paused(signal.SIGKILL)
    with pytest.raises(TransportError, match=r"version 1, bucket \d+ to generator-0 rank 0") as error:
        chain.send(members, first)
    killed.join()
    assert error.value.peer == "generator-0 rank 0"

    start = time.monotonic()
    reports = chain.board.collect(0, 1, ["generator-0 rank 0", "generator-1 rank 0"], timeout_s=20, grace_s=0.2)
    assert time.monotonic() - start < 15  # it was not waited for in vain
    assert list(reports) == ["generator-1 rank 0"]
    assert reports["generator-1 rank 0"].lost == "generator-0 rank 0"
    event = chain.peers["generator-1"].event()
    assert "from generator-0 rank 0" in event["error"]

    second = chain.write(2)
    members = members.without(["generator-0"])
    assert members == Membership(epoch=1, replicas=("generator-1",))
    assert chain.send(members, second) == chain.world.plan.num_bytes
    assert chain.peers["generator-1"].event()["digest"] == digest(chain.world, second, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_replicas_before_a_lost_one_end_their_version(chain: Chain, digest: Digest, number: signal.Signals) -> None:
    """The last of two is killed, or stalls: the trainer notices nothing, the first reports whom it lost."""
    chain.start("generator-0")
    chain.start("generator-1", pause_after=9)
    manifest = chain.write(1)
    signalled = chain.peers["generator-1"].signal_when_paused(number)
    assert chain.send(Membership(epoch=0, replicas=REPLICAS), manifest) == chain.world.plan.num_bytes
    signalled.join()
    event = chain.peers["generator-0"].event()
    assert (event["digest"], event["error"]) == (digest(chain.world, manifest, 0), None)
    reports = chain.board.collect(0, 1, ["generator-0 rank 0", "generator-1 rank 0"], timeout_s=20, grace_s=0.2)
    assert reports == {"generator-0 rank 0": Outcome(member="generator-0 rank 0", lost="generator-1 rank 0")}


def test_every_rank_relays_to_the_same_rank_of_the_next_replica(
    make_world: MakeWorld,
    make_peer: MakePeer,
    meet: Rendezvous,
    board: MembershipBoard,
    put_manifest: Put,
    digest: Digest,
) -> None:
    """Two training ranks, two replicas of two ranks: each training rank sends its part once."""
    world = make_world(tp=2, target_tp=2, bucket_bytes=1000)
    manifest = world.write(1, slot=0)
    put_manifest(manifest)
    members = Membership(epoch=0, replicas=REPLICAS)
    board.announce(members)
    peers = [
        (rank, make_peer(world, replica=replica, rank=rank, relay=True, stall_s=STALL_S))
        for replica in REPLICAS
        for rank in range(2)
    ]

    def send(rank: int) -> int:
        sealed = SharedMemoryBuckets(world.plan, world.folder, world.num_slots)
        meeting = Meeting(rendezvous=meet, timeout_s=60)
        return open_relay_sender(world.plan, rank, members, meeting, sealed).send(manifest, timeout_s=15)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(send, range(2))) == [world.plan.source_bytes(rank) for rank in range(2)]
    for rank, peer in peers:
        assert peer.event()["digest"] == digest(world, manifest, rank)


def test_links_join_neighbours(make_world: MakeWorld) -> None:
    plan = make_world(dp=2, target_tp=2).plan
    found = links(plan, Membership(epoch=3, replicas=REPLICAS))
    assert [(spec.name, spec.epoch) for spec in found] == [
        ("trainer to generator-0", 3),
        ("generator-0 to generator-1", 3),
    ]
    assert found[0].members == (
        "trainer rank 0",
        "trainer rank 1",
        "generator-0 rank 0",
        "generator-0 rank 1",
    )


def test_the_board_waits_no_longer_than_said(board: MembershipBoard) -> None:
    with pytest.raises(TransportError, match=r"epoch/7 was not there within 0\.2 s"):
        board.await_epoch(7, timeout_s=0.2)
    assert board.collect(0, 1, ["a rank 0"], timeout_s=0.2) == {}

    start = time.monotonic()
    board.report(0, 2, Outcome(member="a rank 1"))
    found = board.collect(0, 2, ["a rank 0", "a rank 1"], timeout_s=60, suspected=["a rank 0"], grace_s=0.1)
    assert list(found) == ["a rank 1"]
    assert time.monotonic() - start < 30


def test_membership_keeps_the_order() -> None:
    members = Membership(epoch=0, replicas=("a", "b", "c"))
    assert members.without(["b"]).joined_by("d") == Membership(epoch=2, replicas=("a", "c", "d"))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_chain_of_three_closes_its_gap(chain: Chain, digest: Digest, lost: int) -> None:
    """Four processes, one replica is killed. Those before it are whole, those behind it know at once, long before
    their timeout, also the one that is not next to it; the next epoch's chain joins the two that are left."""
    names = ("generator-0", "generator-1", "generator-2")
    members = Membership(epoch=0, replicas=names)
    for place, name in enumerate(names):
        chain.start(name, num_epochs=2, timeout_s=60, pause_after=9 if place == lost else 0)
    first = chain.write(1)
    killed = chain.peers[names[lost]].signal_when_paused(signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(TransportError) if lost == 0 else nullcontext():
        chain.send(members, first)
    killed.join()

    ranks = [f"{name} rank 0" for name in names]
    reports = chain.board.collect(0, 1, ranks, timeout_s=55, suspected=[ranks[lost]], grace_s=0.2)
    assert time.monotonic() - start < 30
    assert reports.keys() == set(ranks) - {ranks[lost]}
    for place, rank in enumerate(ranks):
        if place != lost:
            assert (reports[rank].error is None) == (place < lost)
            assert reports[rank].lost == neighbour(ranks, place, lost)

    second = chain.write(2)
    assert chain.send(members.without([names[lost]]), second) == chain.world.plan.num_bytes
    for place, name in enumerate(names):
        if place != lost:
            chain.peers[name].event()
            assert chain.peers[name].event()["digest"] == digest(chain.world, second, 0)


def neighbour(ranks: list[str], place: int, lost: int) -> str | None:
    """Whom the replica at `place` misses: the one before it if that is lost or has hung up, the lost one behind it."""
    if place > lost:
        return ranks[place - 1]

    return ranks[lost] if place == lost - 1 else None


class Flipped:
    """Sealed buckets, one with a flipped bit."""

    def __init__(self, world: World, bucket_id: int) -> None:
        self._buckets = SharedMemoryBuckets(world.plan, world.folder, world.num_slots)
        self._bucket_id = bucket_id

    def payload(self, manifest: Manifest, bucket_id: int) -> torch.Tensor:
        payload = self._buckets.payload(manifest, bucket_id).clone()
        payload[0] ^= bucket_id == self._bucket_id
        return payload


def test_every_hop_finds_a_flipped_bit_and_nobody_is_lost(chain: Chain, digest: Digest) -> None:
    for replica in REPLICAS:
        chain.start(replica, num_epochs=2)
    first = chain.write(1)
    last = transfer_order(chain.world.plan)[-1].id
    members = Membership(epoch=0, replicas=REPLICAS)
    chain.send(members, first, buckets=Flipped(chain.world, last))
    reports = chain.board.collect(0, 1, [f"{name} rank 0" for name in REPLICAS], timeout_s=20)
    for name in REPLICAS:
        assert f"version 1, bucket {last} of source rank 0" in chain.peers[name].event()["error"]
        outcome = reports[f"{name} rank 0"]
        assert outcome.lost is None
        assert "the payload hashes to" in str(outcome.error)

    second = chain.write(2)
    chain.send(members.without([]), second)
    for name in REPLICAS:
        assert chain.peers[name].event()["digest"] == digest(chain.world, second, 0)
