"""Transport between processes that share nothing: point to point on a joint group of trainers and one replica.

Every bucket is a message with its header (the segments' own), then its payload in chunks, a few of them in flight.
Sender and receiver walk the plan's buckets in one order, so that nobody asks for anything. Group and API:
`engine.transport_group`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

import torch

from engine.buckets import BucketSpec
from engine.plan import Plan
from engine.segments import BucketHeader, BucketState, WeightTransferError
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
from engine.transport_group import Communicator, Transfer
from engine.types import Manifest

_IN_FLIGHT = 4  # chunks under way: the next one arrives while this one is hashed


class PointToPointSender:
    """A `BucketSender` of one source rank to one replica.

    A replica that dies or stalls costs this sender at most `timeout_s`; senders to other replicas have groups of their
    own and notice nothing.
    """

    def __init__(self, plan: Plan, source_rank: int, group: Communicator, buckets: SealedBuckets) -> None:
        """Args: group: `GroupSpec.between("trainer", plan.source.num_ranks, replica, plan.target.num_ranks)`."""
        self._plan, self._group, self._buckets = plan, group, buckets
        self._order = [bucket for bucket in transfer_order(plan) if bucket.source_rank == source_rank]

    @property
    def bytes_sent(self) -> int:
        """What has left this process, headers included."""
        return self._group.bytes_sent

    def send(self, manifest: Manifest, *, timeout_s: float) -> int:
        """Send all buckets of this rank; see `BucketSender`."""
        deadline = Deadline(timeout_s)
        check_manifest(manifest, self._plan.hash, self._plan.num_buckets)
        num_bytes = 0
        for bucket in self._order:
            peer = self._plan.source.num_ranks + bucket.target_rank
            num_bytes += self._send_bucket(manifest, bucket, peer, deadline)
        return num_bytes

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._group.close()

    def _send_bucket(self, manifest: Manifest, bucket: BucketSpec, peer: int, deadline: Deadline) -> int:
        try:
            payload = self._buckets.payload(manifest, bucket.id)
            flight = Flight(self._group, peer)
            flight.send(header_message(manifest, bucket, payload.numel()), deadline)
            for start, end in chunk_bounds(payload.numel()):
                flight.send(payload[start:end], deadline)
            flight.land(deadline)
        except WeightTransferError as error:
            what = f"version {manifest.version}, bucket {bucket.id} to {self._group.spec.members[peer]}"
            self._group.abort(f"{what} was not sent")  # half a bucket is on its way: nobody could go on
            raise TransportError(f"{what}: {error}", peer=self._group.spec.members[peer]) from error

        return payload.numel()


class PointToPointReceiver:
    """A `BucketReceiver` of one target rank, on the group with all source ranks."""

    def __init__(self, plan: Plan, target_rank: int, group: Communicator) -> None:
        self._plan, self._group = plan, group
        self.order = tuple(bucket for bucket in transfer_order(plan) if bucket.target_rank == target_rank)

    def fetch(self, manifest: Manifest, bucket_id: int, out: torch.Tensor, *, timeout_s: float) -> None:
        """Receive and hash a bucket chunk by chunk; see `BucketReceiver`."""
        check_manifest(manifest, self._plan.hash, self._plan.num_buckets)
        bucket = self._plan.buckets[bucket_id]
        for _ in receive(self._group, bucket.source_rank, manifest, bucket, out, Deadline(timeout_s)):
            pass

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._group.close()


class Flight:
    """Messages to one peer under way, a few at a time."""

    def __init__(self, group: Communicator, peer: int) -> None:
        self._group, self._peer = group, peer
        self._transfers: deque[Transfer] = deque()

    def send(self, message: torch.Tensor, deadline: Deadline) -> None:
        """Start to send, having waited until there is room."""
        while len(self._transfers) >= _IN_FLIGHT:
            self._transfers.popleft().wait(deadline)
        self._transfers.append(self._group.send(message, self._peer))

    def land(self, deadline: Deadline) -> None:
        """Wait until all of them have arrived."""
        while self._transfers:
            self._transfers.popleft().wait(deadline)


def receive(
    group: Communicator, peer: int, manifest: Manifest, bucket: BucketSpec, out: torch.Tensor, deadline: Deadline
) -> Iterator[tuple[int, int]]:
    """Receive a bucket into `out`; yield start and end of every chunk that has arrived and been hashed.

    What is yielded is not proven yet: only the end of the iteration is. An error within gives the group up, but for a
    digest that differs: the stream is whole then, and the peer may go on.

    Raises:
        TransportError: the peer is gone or too slow, sends another bucket or size, or the digest differs.
    """
    name = group.spec.members[peer]
    verifier = Verifier(manifest, bucket, out, name)
    arrived = 0
    try:
        _receive_header(group, peer, manifest, bucket, deadline)
        bounds = verifier.chunks()
        flying: deque[tuple[int, int, Transfer]] = deque()
        while True:
            while len(flying) < _IN_FLIGHT and (bound := next(bounds, None)) is not None:
                flying.append((*bound, group.recv(out[slice(*bound)], peer)))
            if not flying:
                break

            start, arrived_end, transfer = flying.popleft()
            transfer.wait(deadline)
            arrived = arrived_end
            verifier.update(start, arrived)
            yield start, arrived
    except BaseException as error:
        group.abort(f"{verifier.where} broke off")  # whatever it was, the peer's stream cannot be taken up again
        if not isinstance(error, WeightTransferError):
            raise

        raise TransportError(
            f"{verifier.where}: {arrived} of {bucket.num_bytes} bytes arrived: {error}", peer=name
        ) from error

    verifier.finish()


def transfer_order(plan: Plan) -> tuple[BucketSpec, ...]:
    """The plan's buckets in the one order in which all ranks walk them.

    Every rank waits for the other side of its first bucket that is not done; as the order is total, the first of all
    such buckets always has both sides there: no deadlock. Round k holds the k-th bucket of every pair of ranks, pairs
    by diagonals, so that the sources serve different targets at a time.

    Example: 2 source and 2 target ranks: (0, 0), (1, 1), then (0, 1), (1, 0), then the second bucket of (0, 0), ...
    """
    rounds: dict[tuple[int, int], int] = defaultdict(int)
    keys: dict[int, tuple[int, int, int]] = {}
    for bucket in plan.buckets:
        pair = bucket.source_rank, bucket.target_rank
        diagonal = (bucket.target_rank - bucket.source_rank) % plan.target.num_ranks
        keys[bucket.id] = rounds[pair], diagonal, bucket.id
        rounds[pair] += 1
    return tuple(sorted(plan.buckets, key=lambda bucket: keys[bucket.id]))


def header_message(manifest: Manifest, bucket: BucketSpec, num_bytes: int) -> torch.Tensor:
    """The header of a bucket as it is sent: with the size that the sender really has."""
    names = manifest.plan_hash, manifest.epoch, manifest.written_version, bucket.id, num_bytes
    header = BucketHeader(BucketState.SEALED, *names, manifest.digests[bucket.id])
    return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)


def _receive_header(group: Communicator, peer: int, manifest: Manifest, bucket: BucketSpec, deadline: Deadline) -> None:
    wanted = sealed_header(manifest, bucket)
    message = torch.empty(len(wanted.pack()), dtype=torch.uint8)
    group.recv(message, peer).wait(deadline)
    found = BucketHeader.unpack(message.numpy().tobytes())
    check_header(found, wanted, "the header that arrived")
