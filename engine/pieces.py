"""What every target rank needs and who could send it: the intersection of two layouts. Pure, no torch.

The boxes of a tensor on the source side are refined to atoms, each with all its holders; what a target rank needs is
intersected with the atoms. Ranks that share one tuple of shards (data-parallel ranks, replicas) are looked at once, and
tensors that are cut alike (the layers of a model, its experts) share one geometry: the cost is that of the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.layout import DTYPE_BYTES, Box, Index, Layout, LayoutError, Shard, TensorSpec
from engine.placement import Placement
from engine.transforms import TRANSFORMS, transform_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_EXACT_CASTS = {("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")}
_CHOSEN_CASTS = {("float32", "bfloat16")}  # a recipe with a float32 trainer and a bfloat16 generator wants just this


class PlanError(LayoutError):
    """Two layouts that cannot be joined exactly; the message names tensor, ranks and both values."""


class Piece(NamedTuple):
    """A box that a target rank needs and somebody has.

    Attributes:
        target, box, dtype: what is needed, and how; `box` is inside `target.box`.
        held: source group -> the shard that holds it there.
    """

    target: Shard
    box: Box
    dtype: str
    held: Mapping[int, Shard]

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return self.box.num_elements * DTYPE_BYTES[self.dtype]


class Block(NamedTuple):
    """What a target rank needs from one set of holders; replicas share `pieces`, the very same object."""

    target_rank: int
    pieces: tuple[Piece, ...]
    num_bytes: int


@dataclass(frozen=True)
class Pieces:
    """Everything that must come from somewhere.

    Attributes:
        group_of_rank: source rank -> its group, the key in `Piece.held`.
        by_holders: candidate ranks (ascending) -> what any of them may send, by target rank. Ordered by those ranks.
        local: (source rank, block) that the target rank's own device already holds.
    """

    group_of_rank: tuple[int, ...]
    by_holders: Mapping[tuple[int, ...], list[Block]]
    local: tuple[tuple[int, Block], ...]


def find_pieces(source: Layout, target: Layout, bucket_bytes: int, placement: Placement | None) -> Pieces:
    """Intersect what every target rank needs with what the source ranks have.

    Raises:
        PlanError: an element has no holder, a cast would lose precision, two forms differ, or `bucket_bytes` is too
            small for one element.
    """
    holders = _Source(source)
    by_holders: dict[tuple[int, ...], list[Block]] = defaultdict(list)
    local: list[tuple[int, Block]] = []
    for rank, needs in enumerate(_needs(holders, target, bucket_bytes)):
        for groups, block in needs.items():
            own, candidates = holders.candidates(groups, rank, placement)
            if own is None:
                by_holders[candidates].append(block._replace(target_rank=rank))
            else:
                local.append((own, block._replace(target_rank=rank)))
    return Pieces(tuple(holders.group_of_rank), dict(sorted(by_holders.items())), tuple(local))


def kept_bytes(source: Layout, target: Layout) -> NDArray[np.int64]:
    """Return the bytes of each target rank (rows) that each source rank (columns) holds, in the target's dtypes."""
    import numpy as np

    holders = _Source(source)
    by_group = np.zeros((target.num_ranks, max(holders.group_of_rank) + 1), dtype=np.int64)
    for rank, needs in enumerate(_needs(holders, target, max(DTYPE_BYTES.values()))):
        for groups, block in needs.items():
            by_group[rank, list(groups)] += block.num_bytes
    return by_group[:, holders.group_of_rank]


_Needs = Mapping[tuple[int, ...], Block]
"""Source groups that hold them all -> pieces of one target rank."""


def _needs(holders: _Source, target: Layout, bucket_bytes: int) -> Iterator[_Needs]:
    """Yield for every target rank what it needs, computed once for all that share it."""
    found: dict[tuple[int, int], _Needs] = {}
    for rank, shards in enumerate(target.shards):
        key = _group_key(target, rank)
        if key not in found:
            by_groups: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
            for shard in shards:
                for piece in holders.pieces(target, rank, shard, bucket_bytes):
                    by_groups[tuple(piece.held)].append(piece)
            found[key] = {
                groups: Block(rank, tuple(pieces), sum(piece.num_bytes for piece in pieces))
                for groups, pieces in by_groups.items()
            }
        yield found[key]


class _Atoms:
    """The boxes of one tensor on the source side, refined until each is held whole or not at all by every rank."""

    def __init__(self, boxes: tuple[Box, ...]) -> None:
        self.atoms = _refined(boxes)
        self._common: dict[Box, tuple[list[tuple[int, Box]], Box | None]] = {}

    def common(self, box: Box) -> tuple[list[tuple[int, Box]], Box | None]:
        """Return (number of the atom, its part inside `box`) for all that meet it, and a part that none covers."""
        found = self._common.get(box)
        if found is None:
            parts = [(number, atom.intersect(box)) for number, (atom, _) in enumerate(self.atoms)]
            met = [(number, part) for number, part in parts if part is not None]
            missing = None
            if sum(part.num_elements for _, part in met) != box.num_elements:
                rest = [box]
                for _, part in met:
                    rest = [left for piece in rest for left in piece.subtract(part)]
                missing = rest[0]
            self._common[box] = found = met, missing
        return found


def _refined(boxes: tuple[Box, ...]) -> list[tuple[Box, tuple[int, ...]]]:
    """Return disjoint boxes that cover `boxes`, each with the numbers of those that contain it."""
    atoms: list[tuple[Box, tuple[int, ...]]] = []
    for number, box in enumerate(boxes):
        parts: list[tuple[Box, tuple[int, ...]]] = []
        rest = [box]
        for atom, owners in atoms:
            common = atom.intersect(box)
            if common is None:
                parts.append((atom, owners))
            else:
                parts.append((common, (*owners, number)))
                parts.extend((part, owners) for part in atom.subtract(common))
                rest = [left for part in rest for left in part.subtract(common)]
        atoms = parts + [(part, (number,)) for part in rest]
    return sorted(atoms, key=lambda atom: (atom[0].start, atom[0].shape))


class _Source:
    """Who holds what on the source side, by tensor and atom."""

    def __init__(self, source: Layout) -> None:
        self._layout = source
        self.group_of_rank: list[int] = []
        self._ranks: list[list[int]] = []  # by group
        self._boxes: dict[str, dict[Box, dict[int, Shard]]] = defaultdict(lambda: defaultdict(dict))
        self._atoms: dict[tuple[Box, ...], _Atoms] = {}
        self._held: dict[str, tuple[_Atoms, list[dict[int, Shard]]]] = {}
        self._candidates: dict[tuple[tuple[int, ...], int], tuple[int | None, tuple[int, ...]]] = {}
        self._checked: dict[tuple[int, str, str], bool] = {}
        groups: dict[tuple[int, int], int] = {}
        for rank, shards in enumerate(source.shards):
            key = _group_key(source, rank)
            if key not in groups:
                groups[key] = len(self._ranks)
                self._ranks.append([])
                for shard in shards:
                    self._boxes[shard.tensor][shard.box].setdefault(groups[key], shard)

            self.group_of_rank.append(groups[key])
            self._ranks[groups[key]].append(rank)

    def pieces(self, target: Layout, rank: int, shard: Shard, bucket_bytes: int) -> Iterator[Piece]:
        """Yield the pieces of one block of a target rank."""
        dtype = target.params[rank][shard.param].dtype
        if bucket_bytes < DTYPE_BYTES[dtype]:
            raise PlanError(f"bucket_bytes={bucket_bytes} cannot hold one {dtype} of {shard.tensor}")

        atoms, holders = self._holders(shard.tensor)
        met, missing = atoms.common(shard.box)
        if missing is not None:
            raise PlanError(
                f"{shard.tensor}: target rank {rank} needs {missing} for {shard.param}, "
                f"but no rank of {self._layout.name} holds it"
            )

        for number, box in met:
            self._check(holders[number], target, rank, shard, dtype)
            yield Piece(shard, box, dtype, holders[number])

    def candidates(
        self, groups: tuple[int, ...], target_rank: int, placement: Placement | None
    ) -> tuple[int | None, tuple[int, ...]]:
        """Return the rank on the target's own device, if it is a holder, and the ranks that may send otherwise."""
        key = groups, -1 if placement is None else placement.target_devices[target_rank]
        found = self._candidates.get(key)
        if found is None:
            ranks = tuple(sorted(rank for group in groups for rank in self._ranks[group]))
            found = (None, ranks) if placement is None else placement.nearest(ranks, target_rank)
            self._candidates[key] = found
        return found

    def _holders(self, tensor: str) -> tuple[_Atoms, list[dict[int, Shard]]]:
        found = self._held.get(tensor)
        if found is None:
            boxes = dict(sorted(self._boxes[tensor].items(), key=_box_key))
            shape = tuple(boxes)
            atoms = self._atoms.get(shape)
            if atoms is None:
                atoms = self._atoms[shape] = _Atoms(shape)

            shards = list(boxes.values())
            self._held[tensor] = found = atoms, [_merged(shards, owners) for _, owners in atoms.atoms]
        return found

    def _check(self, held: Mapping[int, Shard], target: Layout, rank: int, shard: Shard, dtype: str) -> None:
        """Raise unless every holder has what the target wants, in a dtype that loses nothing."""
        key = id(held), dtype, transform_of(shard)
        if key in self._checked:
            return

        for group, holder in held.items():
            source_rank = self._ranks[group][0]
            found = self._layout.params[source_rank][holder.param].dtype
            if found != dtype and (found, dtype) not in _EXACT_CASTS | _CHOSEN_CASTS:
                raise PlanError(
                    f"{shard.tensor}: source rank {source_rank} holds {found}, target rank {rank} wants {dtype}: "
                    f"that cast loses precision"
                )

            _check_transforms(holder, source_rank, shard, rank)
        self._checked[key] = True


def _merged(shards: list[dict[int, Shard]], owners: tuple[int, ...]) -> dict[int, Shard]:
    """Join the holders of several boxes, by group; a group that has the atom twice sends it from the first."""
    if len(owners) == 1:
        return shards[owners[0]]

    merged: dict[int, Shard] = {}
    for number in owners:
        merged = shards[number] | merged
    return dict(sorted(merged.items()))


def _check_transforms(holder: Shard, source_rank: int, shard: Shard, target_rank: int) -> None:
    held, wanted = transform_of(holder), transform_of(shard)
    for name in (held, wanted):
        if name not in TRANSFORMS:
            raise PlanError(f"{shard.tensor}: no transform is called {name!r}; known are {', '.join(TRANSFORMS)}")

    if held != wanted:
        raise PlanError(
            f"{shard.tensor}: source rank {source_rank} holds it as {held!r} ({TRANSFORMS[held]}), target rank "
            f"{target_rank} wants {wanted!r} ({TRANSFORMS[wanted]}): nothing converts between them"
        )


def _group_key(layout: Layout, rank: int) -> tuple[int, int]:
    """Equal for ranks that share one tuple of shards and one mapping of parameters."""
    return id(layout.shards[rank]), id(layout.params[rank])


def _box_key(item: tuple[Box, object]) -> tuple[Index, Index]:
    return item[0].start, item[0].shape


def check_same_model(source: Layout, target: Layout) -> None:
    """Raise PlanError unless both sides are made of the same canonical tensors."""
    only_source = sorted(source.tensors.keys() - target.tensors.keys())
    only_target = sorted(target.tensors.keys() - source.tensors.keys())
    if only_source or only_target:
        raise PlanError(
            f"{source.name} and {target.name} are not of one model: "
            f"only the source has {_some(only_source)}, only the target has {_some(only_target)}"
        )

    for name, spec in sorted(source.tensors.items()):
        other: TensorSpec = target.tensors[name]
        if spec.shape != other.shape:
            raise PlanError(f"{name}: {source.name} has shape {spec.shape}, {target.name} {other.shape}")


def _some(names: list[str], limit: int = 8) -> str:
    """Quote the first few of many names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{names[:limit]}{more}"
