"""Which bytes go from which rank to which: a pure function of two layouts and a bucket size. No torch.

Every target block is intersected with the source's blocks; each piece is taken from one of its holders (the target's
own device, else its node, else any) so that the busiest sender has as little to do as possible; the pieces of one
(source rank, target rank, dtype) are packed in the target's order into buckets. Several replicas share the plan of one:
they read the same buckets. `python -m engine.plan` prints what a plan costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from engine.balance import HolderClass, fair_shares
from engine.buckets import BucketSpec, Copy, coalesce, difference, fill, shifted, split_at
from engine.layout import DTYPE_BYTES, Box, Index, Layout, Shard, content_hash, map_shared
from engine.pieces import Block, Piece, Pieces, PlanError, check_same_model, find_pieces
from engine.placement import Placement
from engine.transforms import transform_of

__all__ = ["LocalCopies", "Plan", "PlanError", "make_plan"]

_Payload = tuple[str, int, tuple[Copy, ...]]  # dtype, elements, copies
_TOLERANCE = 1 / 64  # of the busiest sender's bytes: what is not cut finer for the sake of balance


@dataclass(frozen=True, slots=True)
class LocalCopies:
    """What a target rank takes from a training rank on its own device: copied there, never packed or sent.

    Attributes:
        source_rank, target_rank: both on one device.
        dtype: the target parameters'.
        copies: in the target's order; their `offset` means nothing.
    """

    source_rank: int
    target_rank: int
    dtype: str
    copies: tuple[Copy, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that need not move."""
        return sum(copy.box.num_elements for copy in self.copies) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """How the weights of `source` reach `target`.

    Attributes:
        source, target: the two layouts.
        bucket_bytes: largest payload of a bucket.
        buckets: by id.
        local: what stays on its device; empty without a placement.
        placement: where the ranks are; None if every holder is as near as the next.
    """

    source: Layout
    target: Layout
    bucket_bytes: int
    buckets: tuple[BucketSpec, ...]
    local: tuple[LocalCopies, ...] = ()
    placement: Placement | None = None

    @property
    def num_buckets(self) -> int:
        """Buckets of one version."""
        return len(self.buckets)

    @property
    def num_copies(self) -> int:
        """Copies of one version, the local ones too."""
        return sum(map(len, self._copies()))

    @property
    def num_bytes(self) -> int:
        """Payload bytes of one version."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @cached_property
    def hash(self) -> str:
        """blake2b-128 (hex) of both layouts and every copy: equal on all ranks, whatever the order of their dicts."""
        place = self.placement
        digests = map_shared(lambda copies: content_hash(list(map(_copy_row, copies))), self._copies())
        rows: list[object] = [[b.id, b.source_rank, b.target_rank, b.dtype, b.num_elements] for b in self.buckets]
        rows += [[part.source_rank, part.target_rank, part.dtype] for part in self.local]
        where = None if place is None else [place.source_devices, place.target_devices, place.device_nodes]
        return content_hash([self.source.hash, self.target.hash, self.bucket_bytes, where, rows, digests])

    def _copies(self) -> Iterator[tuple[Copy, ...]]:
        """Every bucket's and every local part's copies; replicas share them."""
        yield from (bucket.copies for bucket in self.buckets)
        yield from (part.copies for part in self.local)

    def __getstate__(self) -> dict[str, object]:
        """Leave the cached hash behind: every process computes it from what it received."""
        return {key: value for key, value in self.__dict__.items() if key not in {"hash", "_by_source", "_by_target"}}

    @cached_property
    def _by_source(self) -> Mapping[int, tuple[BucketSpec, ...]]:
        return _grouped((bucket.source_rank, bucket) for bucket in self.buckets)

    @cached_property
    def _by_target(self) -> Mapping[int, tuple[BucketSpec, ...]]:
        return _grouped((bucket.target_rank, bucket) for bucket in self.buckets)

    def buckets_of_source(self, rank: int) -> tuple[BucketSpec, ...]:
        """The buckets that a source rank writes, by id."""
        return self._by_source.get(rank, ())

    def buckets_of_target(self, rank: int) -> tuple[BucketSpec, ...]:
        """The buckets that a target rank reads, by id."""
        return self._by_target.get(rank, ())

    def source_bytes(self, rank: int) -> int:
        """Payload bytes that a source rank writes for one version."""
        return sum(bucket.num_bytes for bucket in self.buckets_of_source(rank))

    def target_bytes(self, rank: int) -> int:
        """Payload bytes that a target rank reads for one version."""
        return sum(bucket.num_bytes for bucket in self.buckets_of_target(rank))


def make_plan(source: Layout, target: Layout, *, bucket_bytes: int, placement: Placement | None = None) -> Plan:
    """Return the plan that carries `source` to `target`: every target element exactly once, nothing else.

    Pure and deterministic: equal layouts give an equal plan, on every rank. The wire dtype is the target parameter's;
    float32 to bfloat16 is allowed (the recipe chose the generator's dtype), any other loss of precision is not.

    Args:
        source: the training ranks; a tensor may have several holders (data-parallel ranks, tied embeddings).
        target: one generator replica; all of them (`engine.placement.repeated`) where a placement is given.
        bucket_bytes: largest payload of a bucket; buckets may cut inside a tensor, and inside a row that is larger.
        placement: where the ranks are. What a target's own device holds is then not moved (`Plan.local`), and a holder
            on its node is taken before any other. None: every holder is as near as the next, nothing is local.

    Raises:
        PlanError: the layouts are of different models, an element has no holder, a cast would lose precision, or the
            two sides keep it in different forms.
        LayoutError: the placement is of another number of ranks.
    """
    check_same_model(source, target)
    if placement is not None:
        placement.check(source, target)

    pieces = find_pieces(source, target, bucket_bytes, placement)
    blocks: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for rank, block in _chosen(pieces):
        blocks[rank, block.target_rank].append(block)

    packer = _Packer(bucket_bytes)
    buckets: list[BucketSpec] = []
    for (source_rank, target_rank), taken in sorted(blocks.items(), key=_ranks):
        for dtype, size, copies in packer.packed(taken, pieces.group_of_rank[source_rank]):
            buckets.append(BucketSpec(len(buckets), source_rank, target_rank, dtype, size, copies))
    return Plan(source, target, bucket_bytes, tuple(buckets), _local(pieces), placement)


def _chosen(pieces: Pieces) -> Iterator[tuple[int, Block]]:
    """Choose a sender for everything and cut where balance needs it.

    The blocks of a class lie on a line in the order of the targets, and each holder takes a stretch as long as its
    share: a target has few senders, whose pieces are neighbours.
    """
    classes = [HolderClass(ranks, sum(block.num_bytes for block in line)) for ranks, line in pieces.by_holders.items()]
    shares = fair_shares(classes)
    loads, num_classes = Counter[int](), Counter[int]()
    for share in shares:
        loads.update(share)
        num_classes.update(share.keys())

    busiest, crowd = max(loads.values(), default=0), max(num_classes.values(), default=1)
    tolerance = int(busiest * _TOLERANCE / crowd)  # each class of a holder may be off by as much
    for line, share in zip(pieces.by_holders.values(), shares, strict=True):
        yield from _stretches(line, share, tolerance)


def _stretches(line: list[Block], share: Mapping[int, int], tolerance: int) -> Iterator[tuple[int, Block]]:
    """Give each holder, in order, about its share; what one takes too much or too little, the next makes up."""
    *others, (last, _) = share.items()
    todo = line[::-1]
    room = 0
    for rank, num_bytes in others:
        room += num_bytes
        while todo and room + tolerance >= todo[-1].num_bytes:
            room -= todo[-1].num_bytes
            yield rank, todo.pop()

        if todo and room > tolerance:
            head, tail = _split(todo.pop(), room, tolerance)
            todo += [tail] if tail.pieces else []
            if head.pieces:
                room -= head.num_bytes
                yield rank, head
    yield from ((last, block) for block in reversed(todo))


def _split(block: Block, room: int, tolerance: int) -> tuple[Block, Block]:
    """Split a block after about `room` bytes, inside a piece where none ends close enough."""
    heads: list[Piece] = []
    tails = list(block.pieces[::-1])
    left = room
    while tails and left + tolerance >= tails[-1].num_bytes:
        left -= tails[-1].num_bytes
        heads.append(tails.pop())

    if tails and left > tolerance:
        piece = tails.pop()
        size = DTYPE_BYTES[piece.dtype]
        first, rest = split_at(piece.box, left // size, tolerance // size)
        heads += [piece._replace(box=box) for box in first]
        tails += [piece._replace(box=box) for box in reversed(rest)]
    return _block(block.target_rank, heads), _block(block.target_rank, tails[::-1])


def _block(target_rank: int, pieces: list[Piece]) -> Block:
    return Block(target_rank, tuple(pieces), sum(piece.num_bytes for piece in pieces))


class _Packer:
    """Turns blocks into the payloads of buckets; what several replicas get alike is packed once."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._done: dict[tuple[int, ...], tuple[list[Block], list[_Payload]]] = {}  # keeps alive what the ids name

    def packed(self, blocks: list[Block], group: int) -> list[_Payload]:
        """Return the payloads for what one rank of a source group sends to one target rank."""
        key = group, *(id(block.pieces) for block in blocks)
        if key not in self._done:
            payloads = [
                (dtype, filled[-1].offset + filled[-1].box.num_elements, tuple(filled))
                for dtype, copies in _copies(blocks, group)
                for filled in fill(coalesce(copies), self._bucket_bytes // DTYPE_BYTES[dtype])
            ]
            self._done[key] = blocks, payloads
        return self._done[key][1]


def _local(pieces: Pieces) -> tuple[LocalCopies, ...]:
    blocks: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for rank, block in pieces.local:
        blocks[rank, block.target_rank].append(block)
    return tuple(
        LocalCopies(*ranks, dtype, tuple(coalesce(copies)))
        for ranks, taken in sorted(blocks.items(), key=_ranks)
        for dtype, copies in _copies(taken, pieces.group_of_rank[ranks[0]])
    )


def _ranks(item: tuple[tuple[int, int], object]) -> tuple[int, int]:
    return item[0]


def _copies(blocks: Iterable[Block], group: int) -> list[tuple[str, list[Copy]]]:
    """Return the copies from the ranks of a source group, by dtype."""
    found: dict[str, list[Copy]] = defaultdict(list)
    for block in blocks:
        for piece in block.pieces:
            found[piece.dtype].append(_copy(piece, group))
    return sorted(found.items(), key=lambda item: item[0])


def _copy(piece: Piece, group: int) -> Copy:
    source, target, box = piece.held[group], piece.target, piece.box
    ends = (source.param, _start(source, box), target.param, _start(target, box))
    return Copy(target.tensor, box, *ends, 0, transform_of(target))


def _start(shard: Shard, box: Box) -> Index:
    """Where a part of a shard's box starts in the parameter."""
    if box.start == shard.box.start:
        return shard.param_start

    return shifted(shard.param_start, difference(box.start, shard.box.start))


def _grouped(buckets: Iterable[tuple[int, BucketSpec]]) -> dict[int, tuple[BucketSpec, ...]]:
    found: dict[int, list[BucketSpec]] = defaultdict(list)
    for rank, bucket in buckets:
        found[rank].append(bucket)
    return {rank: tuple(of_rank) for rank, of_rank in found.items()}


def _copy_row(copy: Copy) -> tuple[object, ...]:
    source, target = (copy.source_param, copy.source_start), (copy.target_param, copy.target_start)
    return copy.tensor, copy.box.start, copy.box.shape, *source, *target, copy.offset, copy.transform


if __name__ == "__main__":
    import sys

    from engine.plan_command import main

    sys.exit(main())
