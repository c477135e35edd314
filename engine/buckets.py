"""What a bucket is made of: copies, cut and packed, and the runs in which each side moves them. Pure, no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import add, sub

from engine.layout import DTYPE_BYTES, Box, Index
from engine.transforms import IDENTITY

_Block = tuple[Index, Index]  # (shift from the start of a block, shape)


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of one canonical tensor: from a source parameter through a bucket into a target parameter.

    Attributes:
        tensor, box: what is copied, in canonical coordinates.
        source_param, source_start: where it is on the source rank.
        target_param, target_start: where it goes on the target rank.
        offset: where it starts in the bucket's payload, in elements; its elements lie there densely, row by row.
        transform: the form in which both sides keep it, a name of `engine.transforms.TRANSFORMS`.
    """

    tensor: str
    box: Box
    source_param: str
    source_start: Index
    target_param: str
    target_start: Index
    offset: int = 0
    transform: str = IDENTITY

    def part(self, shift: Index, shape: Index) -> Copy:
        """The copy of a block of this one: `shift` from its start, `shape` large."""
        return Copy(
            self.tensor,
            Box(shifted(self.box.start, shift), shape),
            self.source_param,
            shifted(self.source_start, shift),
            self.target_param,
            shifted(self.target_start, shift),
            self.offset,
            self.transform,
        )

    def at(self, offset: int) -> Copy:
        """The same copy elsewhere in the payload."""
        source, target = (self.source_param, self.source_start), (self.target_param, self.target_start)
        return Copy(self.tensor, self.box, *source, *target, offset, self.transform)


@dataclass(frozen=True, slots=True)
class Run:
    """A block of one parameter that lies densely in a bucket: copies that one side can move at once.

    Example: q, k and v heads of one layer arrive as several copies; in the target's order they are one block of rows.
    """

    param: str
    box: Box
    offset: int


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """A run of bytes that one source rank writes and one target rank (of every replica) reads, whole or not at all.

    Attributes:
        id: global, dense: 0 to `plan.num_buckets - 1`.
        source_rank, target_rank: who writes and who reads.
        dtype: of every element in it; the target parameter's.
        num_elements: size of the payload, without gaps.
        copies: in payload order.
    """

    id: int
    source_rank: int
    target_rank: int
    dtype: str
    num_elements: int
    copies: tuple[Copy, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def source_runs(self) -> list[Run]:
        """What the source rank packs, in payload order, neighbours joined."""
        return _runs((copy.source_param, copy.source_start, copy) for copy in self.copies)

    @property
    def target_runs(self) -> list[Run]:
        """What the target rank unpacks, in payload order, neighbours joined."""
        return _runs((copy.target_param, copy.target_start, copy) for copy in self.copies)


def coalesce(copies: list[Copy]) -> list[Copy]:
    """Put copies in the target's order and join those that are neighbours on both sides, dim by dim."""
    alike: dict[tuple[str, str, str], list[Copy]] = defaultdict(list)
    for copy in copies:
        alike[copy.tensor, copy.target_param, copy.source_param].append(copy)

    joined = [copy for group in alike.values() for copy in (group if len(group) == 1 else _join(group))]
    return sorted(joined, key=lambda copy: (copy.target_param, copy.target_start))


def _join(copies: list[Copy]) -> list[Copy]:
    """Join neighbours among copies of one tensor between two parameters."""
    for dim in reversed(range(len(copies[0].box.shape))):
        joined: list[Copy] = []
        for copy in sorted(copies, key=lambda copy: _line_key(copy, dim)):
            last = joined[-1] if joined else None
            if last is not None and _follows(last, copy, dim):
                shape = last.box.shape
                grown = (*shape[:dim], shape[dim] + copy.box.shape[dim], *shape[dim + 1 :])
                joined[-1] = last.part((0,) * len(shape), grown)
            else:
                joined.append(copy)
        copies = joined
    return copies


def _line_key(copy: Copy, dim: int) -> tuple[Index, Index, Index]:
    """Sorts copies so that those on one line along `dim` follow one another."""
    start, shape = copy.box.start, copy.box.shape
    return (*start[:dim], *start[dim + 1 :]), (*shape[:dim], *shape[dim + 1 :]), start[dim : dim + 1]


def _follows(first: Copy, second: Copy, dim: int) -> bool:
    """Whether `second` is what lies next to `first` along `dim`, in the tensor and in both parameters."""
    size, rank = first.box.shape, len(first.box.shape)
    if _line_key(first, dim)[:2] != _line_key(second, dim)[:2]:
        return False

    shift = (*(0 for _ in range(dim)), size[dim], *(0 for _ in range(dim + 1, rank)))
    ahead = first.part(shift, second.box.shape)
    return (ahead.box, ahead.source_start, ahead.target_start) == (second.box, second.source_start, second.target_start)


def fill(copies: list[Copy], capacity: int) -> Iterator[list[Copy]]:
    """Pack copies into buckets of at most `capacity` elements, cutting by rows, inside a row only if it is larger."""
    packed: list[Copy] = []
    used = 0
    todo = copies[::-1]
    while todo:
        copy = todo.pop()
        size = copy.box.num_elements
        if size <= capacity - used:
            packed.append(copy if copy.offset == used else copy.at(used))
            used += size
            continue

        blocks = [copy.part(shift, shape) for shift, shape in _split(copy.box.shape, capacity - used, capacity)]
        if not blocks:
            yield packed
            packed, used = [], 0
            todo.append(copy)
            continue

        packed.append(blocks[0].at(used))
        used += blocks[0].box.num_elements
        todo.extend(reversed(blocks[1:]))

    if packed:
        yield packed


def cut(box: Box, capacity: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `capacity` elements, in the way that buckets are filled."""
    todo = [box]
    while todo:
        part = todo.pop()
        blocks = [Box(shifted(part.start, shift), shape) for shift, shape in _split(part.shape, capacity, capacity)]
        yield blocks[0]
        todo.extend(reversed(blocks[1:]))


def split_at(box: Box, count: int, grain: int) -> tuple[list[Box], list[Box]]:
    """Split a box, in row order, after about `count` elements: between two rows unless a row is larger than `grain`.

    Example: `Box((0, 0), (4, 10))` after 23 elements: with grain 10 after 2 rows, with grain 1 after 2 rows and 3.
    """
    if not 0 < count < box.num_elements:
        return ([], [box]) if count <= 0 else ([box], [])

    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    row = Box(box.start[dim:], (1, *box.shape[dim + 1 :])).num_elements
    num_rows, inside = divmod(count, row)
    if row <= grain:
        num_rows, inside = num_rows + (2 * inside > row), 0

    head, tail = _rows(box, dim, 0, num_rows), _rows(box, dim, num_rows + (inside > 0), box.shape[dim])
    middle, rest = split_at(_rows(box, dim, num_rows, num_rows + 1)[0], inside, grain) if inside else ([], [])
    return [*head, *middle], [*rest, *tail]


def _rows(box: Box, dim: int, first: int, last: int) -> list[Box]:
    """Indices [first, last) of a box in one dim, counted from its start; nothing if there are none."""
    if first >= last:
        return []

    return [Box(_with(box.start, dim, box.start[dim] + first), _with(box.shape, dim, last - first))]


def chunks(runs: Iterable[Run], capacity: int) -> list[list[Run]]:
    """Cut runs into consecutive groups of at most `capacity` elements: what is moved, then hashed, in one go."""
    groups: list[list[Run]] = []
    room = 0
    for run in runs:
        offset = run.offset
        for box in cut(run.box, capacity):
            if not groups or box.num_elements > room:
                groups.append([])
                room = capacity

            groups[-1].append(Run(run.param, box, offset))
            offset += box.num_elements
            room -= box.num_elements
    return groups


def _split(shape: Index, room: int, capacity: int) -> list[_Block]:
    """Split a block of `shape` into a head of at most `room` elements and the rest.

    Nothing is returned if not even one row fits into `room` but would into an empty bucket of `capacity`.

    Example: shape (5, 4), room 10, capacity 16 gives the head ((0, 0), (2, 4)) and the rest ((2, 0), (3, 4)).
    """
    origin = (0,) * len(shape)
    if Box(origin, shape).num_elements <= room:
        return [(origin, shape)]

    if room == 0:
        return []

    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    if dim > 0 and Box(origin, shape).num_elements <= capacity:  # a row, or what is left of one, that need not be cut
        return []

    row = Box(origin[dim:], (1, *shape[dim + 1 :])).num_elements
    num_rows = room // row
    if num_rows == 0:
        head = _split(_with(shape, dim, 1), room, capacity)  # nothing if the row fits into an empty bucket
        num_rows = 1
    else:
        head = [(origin, _with(shape, dim, num_rows))]

    rest = (_with(origin, dim, num_rows), _with(shape, dim, shape[dim] - num_rows))
    return [*head, rest] if head else []


def _runs(blocks: Iterable[tuple[str, Index, Copy]]) -> list[Run]:
    """Join blocks of one parameter that follow one another both there and in the payload."""
    runs: list[Run] = []
    for param, start, copy in blocks:
        box = Box(start, (1,) * (len(start) - len(copy.box.shape)) + copy.box.shape)
        last = runs[-1] if runs else None
        joined = _joined(last.box, box) if last is not None and last.param == param else None
        if last is not None and joined is not None:
            runs[-1] = Run(param, joined, last.offset)
        else:
            runs.append(Run(param, box, copy.offset))
    return runs


def _joined(first: Box, second: Box) -> Box | None:
    """Return the block whose dense elements are those of `first`, then those of `second`; None if there is none."""
    for dim, size in enumerate(first.shape):
        ahead = first.start[dim] + size == second.start[dim]
        if (
            ahead
            and first.start[dim + 1 :] == second.start[dim + 1 :]
            and first.shape[dim + 1 :] == second.shape[dim + 1 :]
        ):
            return Box(first.start, _with(first.shape, dim, size + second.shape[dim]))

        if size != 1 or second.shape[dim] != 1 or first.start[dim] != second.start[dim]:
            return None
    return None


def shifted(start: Index, shift: Index) -> Index:
    """Add `shift` to the last dims of `start`."""
    leading = len(start) - len(shift)
    return (*start[:leading], *map(add, start[leading:], shift)) if leading else tuple(map(add, start, shift))


def difference(first: Index, second: Index) -> Index:
    """Subtract dim by dim."""
    return tuple(map(sub, first, second))


def _with(values: Index, dim: int, value: int) -> Index:
    return (*values[:dim], value, *values[dim + 1 :])
