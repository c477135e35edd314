"""Relay to several replicas: the training ranks send each byte once, every replica hands it on to the next.

The replicas of a membership epoch are a chain: trainer -> replica 0 -> replica 1 -> ... . Target rank t of a replica
forwards a chunk to rank t of the next one while its own next chunk arrives; chunks that have been forwarded are not
proven yet, so every hop hashes and checks for itself.

A replica that dies breaks the chain there. Those before it end their own version and report it lost; those after it
get an error at once, not after a timeout, because everyone who loses the hop before it gives up the hop after it. The
next epoch's chain has no gap (`engine.membership`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.buckets import BucketSpec
from engine.membership import Membership, Outcome
from engine.plan import Plan
from engine.transport import Deadline, SealedBuckets, TransportError, check_manifest
from engine.transport_group import LOOPBACK, Communicator, GroupSpec, Rendezvous
from engine.transport_p2p import Flight, PointToPointSender, header_message, receive, transfer_order
from engine.types import Manifest

TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How the members of a chain find each other.

    Attributes:
        rendezvous: where.
        timeout_s: longest wait for the others of a link.
        backend, host: see `Communicator`.
    """

    rendezvous: Rendezvous
    timeout_s: float
    backend: str = "gloo"
    host: str = LOOPBACK

    def join(self, spec: GroupSpec, rank: int) -> Communicator:
        """Join a group."""
        return Communicator(self.rendezvous, spec, rank, timeout_s=self.timeout_s, backend=self.backend, host=self.host)


def links(plan: Plan, membership: Membership) -> tuple[GroupSpec, ...]:
    """The groups of a chain: link 0 joins all source ranks with the first replica, link i replicas i - 1 and i."""
    num_targets = plan.target.num_ranks
    names = (TRAINER, *membership.replicas)
    sizes = (plan.source.num_ranks, *(num_targets for _ in membership.replicas))
    return tuple(
        GroupSpec.between(before, size, after, num_targets, epoch=membership.epoch)
        for before, size, after in zip(names, sizes, names[1:], strict=False)
    )


def open_relay_sender(
    plan: Plan, source_rank: int, membership: Membership, meeting: Meeting, buckets: SealedBuckets
) -> PointToPointSender:
    """Return the sender of a training rank: it sends to the first replica only. Blocks until the link is there."""
    return PointToPointSender(plan, source_rank, meeting.join(links(plan, membership)[0], source_rank), buckets)


class RelayReceiver:
    """A `BucketReceiver` that hands on what it receives.

    Attributes:
        lost: why nothing is forwarded any more: the next replica's error; None while it takes part, or for the last.
    """

    def __init__(
        self, plan: Plan, replica: str, target_rank: int, membership: Membership, meeting: Meeting, *, stall_s: float
    ) -> None:
        """Join the links before and behind this replica. Blocks until they are there.

        Args:
            plan, replica, target_rank: who we are.
            membership: the chain.
            meeting: how to find the others.
            stall_s: longest wait for the next replica to take a chunk, for the last but one replica; those before it
                wait a multiple, so that whoever is next to a stalled replica drops it first. The trainer's `timeout_s`
                must be larger than `len(replicas) * stall_s`.

        Raises:
            TransportError: the replica before this one did not come. If the one behind did not, it is `lost`.
        """
        place, chain = membership.replicas.index(replica), links(plan, membership)
        num_targets = plan.target.num_ranks
        first_target = num_targets if place > 0 else plan.source.num_ranks
        self._plan, self._target_rank, self._is_first = plan, target_rank, place == 0
        self._member = chain[place].members[first_target + target_rank]
        self._next_rank = num_targets + target_rank
        self._stall_s = stall_s * (len(membership.replicas) - 1 - place)
        self.order = tuple(bucket for bucket in transfer_order(plan) if bucket.target_rank == target_rank)
        self.lost: TransportError | None = None
        self._upstream = meeting.join(chain[place], first_target + target_rank)
        self._downstream: Communicator | None = None
        if place + 1 < len(chain):
            try:
                self._downstream = meeting.join(chain[place + 1], target_rank)
            except TransportError as error:
                self.lost = TransportError(str(error), peer=chain[place + 1].members[self._next_rank])

    @property
    def bytes_sent(self) -> int:
        """What was forwarded, headers included."""
        return 0 if self._downstream is None else self._downstream.bytes_sent

    def fetch(self, manifest: Manifest, bucket_id: int, out: torch.Tensor, *, timeout_s: float) -> None:
        """Receive, hash and forward a bucket chunk by chunk; see `BucketReceiver`.

        That the next replica is lost is no error here: see `lost`.
        """
        check_manifest(manifest, self._plan.hash, self._plan.num_buckets)
        bucket = self._plan.buckets[bucket_id]
        peer = bucket.source_rank if self._is_first else self._target_rank
        flight = self._start_forwarding(manifest, bucket)
        try:
            for start, end in receive(self._upstream, peer, manifest, bucket, out, Deadline(timeout_s)):
                flight = self._forward(flight, out[start:end])
        except BaseException:
            if self._upstream.dead:
                self._hang_up(f"{self._member} lost the member before it")
            raise
        finally:
            self._land(flight)

    def outcome(self, error: TransportError | None = None) -> Outcome:
        """What this rank reports: the error of a fetch, or None if the version is whole; and whom it lost."""
        missing = self.lost if error is None or error.peer is None or not self._upstream.dead else error
        return Outcome(
            member=self._member,
            error=None if error is None else str(error),
            lost=None if missing is None else missing.peer,
        )

    def close(self) -> None:
        """Leave both links. Idempotent."""
        self._upstream.close()
        self._hang_up("closed")

    def _start_forwarding(self, manifest: Manifest, bucket: BucketSpec) -> Flight | None:
        if self._downstream is None or self._downstream.dead:
            return None

        return self._forward(
            Flight(self._downstream, self._next_rank), header_message(manifest, bucket, bucket.num_bytes)
        )

    def _forward(self, flight: Flight | None, message: torch.Tensor) -> Flight | None:
        """Send it on; return the flight, or None when the next replica is lost."""
        if flight is None:
            return None

        try:
            flight.send(message, Deadline(self._stall_s))
        except TransportError as error:
            self.lost = error
            return None

        return flight

    def _land(self, flight: Flight | None) -> None:
        """Wait until the next replica has everything: the buffer is the caller's again."""
        if flight is None or self._downstream is None or self._downstream.dead:
            return

        try:
            flight.land(Deadline(self._stall_s))
        except TransportError as error:
            self.lost = error

    def _hang_up(self, reason: str) -> None:
        if self._downstream is not None:
            self._downstream.abort(reason)
