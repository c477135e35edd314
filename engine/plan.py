"""Which bytes go from which rank to which: a pure function of two layouts and a bucket size. No torch.

Every target block is intersected with the source's blocks; each piece is taken from exactly one of its holders, the
least loaded one; the pieces of one (source rank, target rank, dtype) are packed in the target's order into buckets.
Several replicas share the plan of one: they read the same buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from engine.buckets import BucketSpec, Copy, coalesce, cut, difference, fill, shifted
from engine.layout import DTYPE_BYTES, Box, Index, Layout, LayoutError, Shard, content_hash

_EXACT_CASTS = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}
_CHOSEN_CASTS = {("float32", "bfloat16")}  # a recipe with a float32 trainer and a bfloat16 generator wants just this


class PlanError(LayoutError):
    """Two layouts that cannot be joined exactly; the message names tensor, ranks and both values."""


@dataclass(frozen=True)
class Plan:
    """How the weights of `source` reach `target`.

    Attributes:
        source, target: the two layouts.
        bucket_bytes: largest payload of a bucket.
        buckets: by id.
    """

    source: Layout
    target: Layout
    bucket_bytes: int
    buckets: tuple[BucketSpec, ...]

    @property
    def num_buckets(self) -> int:
        """Buckets of one version."""
        return len(self.buckets)

    @property
    def num_bytes(self) -> int:
        """Payload bytes of one version."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    @cached_property
    def hash(self) -> str:
        """blake2b-128 (hex) of both layouts and every copy: equal on all ranks, whatever the order of their dicts."""
        buckets = [
            (
                bucket.id,
                bucket.source_rank,
                bucket.target_rank,
                bucket.dtype,
                [_copy_row(copy) for copy in bucket.copies],
            )
            for bucket in self.buckets
        ]
        return content_hash([self.source.hash, self.target.hash, self.bucket_bytes, buckets])

    def __getstate__(self) -> dict[str, object]:
        """Leave the cached hash behind: every process computes it from what it received."""
        return {key: value for key, value in self.__dict__.items() if key != "hash"}

    def buckets_of_source(self, rank: int) -> tuple[BucketSpec, ...]:
        """The buckets that a source rank writes, by id."""
        return tuple(bucket for bucket in self.buckets if bucket.source_rank == rank)

    def buckets_of_target(self, rank: int) -> tuple[BucketSpec, ...]:
        """The buckets that a target rank reads, by id."""
        return tuple(bucket for bucket in self.buckets if bucket.target_rank == rank)

    def source_bytes(self, rank: int) -> int:
        """Payload bytes that a source rank writes for one version."""
        return sum(bucket.num_bytes for bucket in self.buckets_of_source(rank))

    def target_bytes(self, rank: int) -> int:
        """Payload bytes that a target rank reads for one version."""
        return sum(bucket.num_bytes for bucket in self.buckets_of_target(rank))


def make_plan(source: Layout, target: Layout, *, bucket_bytes: int) -> Plan:
    """Return the plan that carries `source` to `target`: every target element exactly once, nothing else.

    Pure and deterministic: equal layouts give an equal plan, on every rank. The wire dtype is the target parameter's;
    float32 to bfloat16 is allowed (the recipe chose the generator's dtype), any other loss of precision is not.

    Args:
        source: the training ranks; a tensor may have several holders (data-parallel ranks, tied embeddings).
        target: one generator replica.
        bucket_bytes: largest payload of a bucket; buckets may cut inside a tensor, and inside a row that is larger.

    Raises:
        PlanError: the layouts are of different models, an element has no holder, or a cast would lose precision.
    """
    _check_same_model(source, target)
    pieces = _assign(list(_pieces(source, target, bucket_bytes)), source.num_ranks)
    groups: dict[tuple[int, int, str], list[Copy]] = defaultdict(list)
    for piece, holder in pieces:
        groups[holder.rank, piece.target_rank, piece.dtype].append(piece.copy(holder))

    buckets: list[BucketSpec] = []
    for (source_rank, target_rank, dtype), copies in sorted(groups.items()):
        capacity = bucket_bytes // DTYPE_BYTES[dtype]
        for packed in fill(coalesce(copies), capacity):
            size = packed[-1].offset + packed[-1].box.num_elements
            buckets.append(BucketSpec(len(buckets), source_rank, target_rank, dtype, size, tuple(packed)))
    return Plan(source, target, bucket_bytes, tuple(buckets))


class _Holder(NamedTuple):
    """One source rank's copy of a piece."""

    rank: int
    shard: Shard


class _Piece(NamedTuple):
    """A box that one target rank needs and every one of `holders` has."""

    tensor: str
    box: Box
    dtype: str
    target_rank: int
    target: Shard
    holders: tuple[_Holder, ...]

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * DTYPE_BYTES[self.dtype]

    def copy(self, holder: _Holder) -> Copy:
        source, target = holder.shard, self.target
        return Copy(
            self.tensor,
            self.box,
            source.param,
            shifted(source.param_start, difference(self.box.start, source.box.start)),
            target.param,
            shifted(target.param_start, difference(self.box.start, target.box.start)),
        )


def _check_same_model(source: Layout, target: Layout) -> None:
    """Raise unless both sides are made of the same canonical tensors."""
    only_source, only_target = (
        source.tensors.keys() - target.tensors.keys(),
        target.tensors.keys() - source.tensors.keys(),
    )
    if only_source or only_target:
        raise PlanError(
            f"{source.name} and {target.name} are not of one model: only the source has {sorted(only_source)}, "
            f"only the target has {sorted(only_target)}"
        )

    for name, spec in sorted(source.tensors.items()):
        if spec.shape != target.tensors[name].shape:
            raise PlanError(f"{name}: {source.name} has shape {spec.shape}, {target.name} {target.tensors[name].shape}")


def _holders(source: Layout) -> Mapping[str, Mapping[Box, tuple[_Holder, ...]]]:
    """Return tensor -> box -> the ranks that have it, one shard a rank."""
    found: dict[str, dict[Box, dict[int, Shard]]] = defaultdict(lambda: defaultdict(dict))
    for rank, shards in enumerate(source.shards):
        for shard in shards:
            found[shard.tensor][shard.box].setdefault(rank, shard)

    return {
        tensor: {
            box: tuple(_Holder(*item) for item in sorted(boxes[box].items())) for box in sorted(boxes, key=_box_key)
        }
        for tensor, boxes in found.items()
    }


def _pieces(source: Layout, target: Layout, bucket_bytes: int) -> Iterator[_Piece]:
    """Intersect what every target rank needs with what the source ranks have; cut what is larger than a bucket."""
    holders = _holders(source)
    for target_rank, shards in enumerate(target.shards):
        for shard in shards:
            dtype = target.params[target_rank][shard.param].dtype
            capacity = bucket_bytes // DTYPE_BYTES[dtype]
            if capacity < 1:
                raise PlanError(f"bucket_bytes={bucket_bytes} cannot hold one {dtype} of {shard.tensor}")

            missing = [shard.box]
            for held, ranks in holders.get(shard.tensor, {}).items():
                common = [box for box in (part.intersect(held) for part in missing) if box is not None]
                missing = [rest for part in missing for rest in part.subtract(held)]
                for box in common:
                    _check_casts(source, shard, target_rank, dtype, ranks)
                    for part in cut(box, capacity):
                        yield _Piece(shard.tensor, part, dtype, target_rank, shard, ranks)

            if missing:
                raise PlanError(
                    f"{shard.tensor}: target rank {target_rank} needs {missing[0]} for {shard.param}, "
                    f"but no rank of {source.name} holds it"
                )


def _check_casts(source: Layout, shard: Shard, target_rank: int, dtype: str, holders: Iterable[_Holder]) -> None:
    for holder in holders:
        held = source.params[holder.rank][holder.shard.param].dtype
        if held != dtype and (held, dtype) not in _EXACT_CASTS | _CHOSEN_CASTS:
            raise PlanError(
                f"{shard.tensor}: source rank {holder.rank} holds {held}, target rank {target_rank} wants {dtype}: "
                f"that cast loses precision"
            )


def _assign(pieces: list[_Piece], num_source_ranks: int) -> list[tuple[_Piece, _Holder]]:
    """Choose one holder for every piece so that the busiest source rank has little to do.

    The pieces with the fewest holders go first, large before small, each to the least loaded holder: optimal up to one
    piece where holder sets are nested (data-parallel ranks of one shard, then whole stages), which they nearly are.
    """
    load = [0] * num_source_ranks
    chosen: list[tuple[_Piece, _Holder]] = []
    for piece in sorted(pieces, key=_assignment_key):
        holder = min(piece.holders, key=lambda candidate: (load[candidate.rank], candidate.rank))
        load[holder.rank] += piece.num_bytes
        chosen.append((piece, holder))
    return chosen


def _assignment_key(piece: _Piece) -> tuple[int, int, str, Index, int, str, Index]:
    shard = piece.target
    order = (piece.tensor, piece.box.start, piece.target_rank, shard.param, shard.param_start)
    return len(piece.holders), -piece.num_bytes, *order


def _copy_row(copy: Copy) -> tuple[object, ...]:
    source, target = (copy.source_param, copy.source_start), (copy.target_param, copy.target_start)
    return copy.tensor, copy.box.start, copy.box.shape, *source, *target, copy.offset


def _box_key(box: Box) -> tuple[Index, Index]:
    return box.start, box.shape
