"""Which boxes of which canonical tensor every rank holds, as data. No torch, no process, no device.

A canonical tensor has the name and the shape it has in a Hugging Face folder. A rank holds *parameters*: local tensors,
often fused and cut. A `Shard` says that one block of a local parameter is one box of one canonical tensor; a `Pad` says
that a block of it belongs to no tensor (vocabulary padding). Shards and pads tile every parameter exactly.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

Index = tuple[int, ...]
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
_Value = TypeVar("_Value")

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of every dtype that a layout may name (torch's names without the `torch.`)."""


class LayoutError(ValueError):
    """A layout contradicts itself or cannot be made; the message names tensor, rank and both values."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor, for instance `TensorSpec((151936, 896), "bfloat16")`."""

    shape: Index
    dtype: str

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: [start, start + shape) in every dim.

    Example: rows 4 to 7 of a [10, 3] tensor are `Box((4, 0), (4, 3))`; its `slices` are `(slice(4, 8), slice(0, 3))`.
    """

    start: Index
    shape: Index

    @property
    def stop(self) -> Index:
        """First index past the box, per dim."""
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        """Elements in the box; 0 if it is empty."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in its tensor, for torch, numpy and safetensors' `get_slice` alike."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor; None if there is none."""
        start = tuple(map(max, self.start, other.start))
        shape = tuple(min(a, b) - low for a, b, low in zip(self.stop, other.stop, start, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def subtract(self, hole: Box) -> list[Box]:
        """What is left of this box without `hole`, as disjoint boxes, in a fixed order.

        Example: `Box((0,), (10,)).subtract(Box((4,), (2,)))` is `[Box((0,), (4,)), Box((6,), (4,))]`.
        """
        common = self.intersect(hole)
        if common is None:
            return [self]

        rest: list[Box] = []
        start, shape = list(self.start), list(self.shape)
        for dim, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
            stop = start[dim] + shape[dim]
            for first, last in ((start[dim], low), (high, stop)):
                if first < last:
                    rest.append(Box(_replaced(start, dim, first), _replaced(shape, dim, last - first)))

            start[dim], shape[dim] = low, high - low
        return rest


@dataclass(frozen=True, slots=True)
class Shard:
    """One block of a local parameter is one box of a canonical tensor.

    Attributes:
        tensor: canonical name.
        box: which part of that tensor, in its own coordinates.
        param: local parameter name on this rank.
        param_start: where the block starts in the parameter. The parameter may have more dims than the tensor (stacked
            experts): the block is then one wide in the leading ones.

    Example: the second of two tensor-parallel ranks holds rows 8 to 15 of `up_proj` [16, 4] behind its 8 rows of
    `gate_proj`: `Shard("...up_proj.weight", Box((8, 0), (8, 4)), "...linear_fc1.weight", (8, 0))`, and
    `params[shard.param][shard.param_slices] = tensor[shard.box.slices]` loads it.
    """

    tensor: str
    box: Box
    param: str
    param_start: Index

    @property
    def param_box(self) -> Box:
        """The block in the parameter's coordinates."""
        leading = len(self.param_start) - len(self.box.shape)
        return Box(self.param_start, (1,) * leading + self.box.shape)

    @property
    def param_slices(self) -> tuple[slice | int, ...]:
        """Index of the block in the parameter; extra leading dims are indexed away, so shapes match `box.shape`."""
        leading = len(self.param_start) - len(self.box.shape)
        return (*self.param_start[:leading], *Box(self.param_start[leading:], self.box.shape).slices)


@dataclass(frozen=True, slots=True)
class Pad:
    """A block of a local parameter that belongs to no tensor (vocabulary padding): filled with 0, never copied."""

    param: str
    box: Box


@dataclass(frozen=True)
class Layout:
    """What every rank of one side holds.

    Attributes:
        name: for messages, for instance "megatron tp=2 pp=1 dp=2".
        tensors: canonical tensors by Hugging Face name; tied aliases are not among them.
        params: per rank, local parameters by local name, with their local shapes.
        shards: per rank, the blocks; normalised to one order, so that equal layouts are equal.
        pads: per rank, the blocks that hold no tensor.
        tied: alias -> canonical name, for instance {"lm_head.weight": "model.embed_tokens.weight"}.
        verified: whether the family's table was checked against the loaders of the framework.

    Ranks that hold the same (data-parallel copies) should share the very same objects: they are then checked, sorted
    and hashed once, and `layout.shards[a] is layout.shards[b]` still says so.

    Raises:
        LayoutError: numbers of ranks differ, an unknown tensor, parameter or dtype, a block that does not fit, or a
            parameter that shards and pads do not tile exactly.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    params: tuple[Mapping[str, TensorSpec], ...]
    shards: tuple[tuple[Shard, ...], ...]
    pads: tuple[tuple[Pad, ...], ...]
    tied: Mapping[str, str]
    verified: bool = True

    def __post_init__(self) -> None:
        if not len(self.params) == len(self.shards) == len(self.pads) > 0:
            counts = f"params {len(self.params)}, shards {len(self.shards)}, pads {len(self.pads)}"
            raise LayoutError(f"layout {self.name}: numbers of ranks must be equal and > 0, got {counts}")

        object.__setattr__(self, "shards", map_shared(lambda rank: tuple(sorted(rank, key=_shard_key)), self.shards))
        object.__setattr__(self, "pads", map_shared(lambda rank: tuple(sorted(rank, key=_pad_key)), self.pads))
        _check_tensors(self)
        seen: set[tuple[int, int, int]] = set()
        for rank in range(self.num_ranks):
            content = (id(self.params[rank]), id(self.shards[rank]), id(self.pads[rank]))
            if content not in seen:
                _check_rank(self, rank)
                seen.add(content)

    @property
    def num_ranks(self) -> int:
        """Ranks of this side (of one replica, for a generator)."""
        return len(self.params)

    @property
    def hash(self) -> str:
        """blake2b-128 of all but `name` and `verified`, hex; independent of dict order, process and sharing of objects.

        Computed anew on every access, each rank's part once for all that share it.
        """
        params = map_shared(lambda rank: content_hash(_spec_rows(rank)), self.params)
        shards = map_shared(lambda rank: content_hash([_shard_key(shard) for shard in rank]), self.shards)
        pads = map_shared(lambda rank: content_hash([_pad_key(pad) for pad in rank]), self.pads)
        return content_hash([_spec_rows(self.tensors), params, shards, pads, sorted(self.tied.items())])

    def rank_bytes(self, rank: int) -> int:
        """Bytes of all parameters of one rank, padding included."""
        return sum(spec.num_bytes for spec in self.params[rank].values())

    def check_world_size(self, world_size: int) -> None:
        """Raise unless there are as many processes as ranks.

        Raises:
            LayoutError: with both numbers.
        """
        if world_size != self.num_ranks:
            raise LayoutError(f"layout {self.name} is of {self.num_ranks} ranks, but the world size is {world_size}")


def content_hash(content: object) -> str:
    """Return blake2b-128 (hex) of nested lists, strings and ints, through canonical JSON."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def map_shared(function: Callable[[_Given], _Made], items: Iterable[_Given]) -> tuple[_Made, ...]:
    """Return `function` of every item, called once for each distinct object: items that are one object share it."""
    kept = tuple(items)  # alive while their ids stand for them
    made: dict[int, _Made] = {}
    for item in kept:
        if id(item) not in made:
            made[id(item)] = function(item)
    return tuple(made[id(item)] for item in kept)


def _replaced(values: list[int], dim: int, value: int) -> Index:
    """Return `values` as a tuple with one entry exchanged."""
    return (*values[:dim], value, *values[dim + 1 :])


def _spec_rows(specs: Mapping[str, TensorSpec]) -> list[tuple[str, Index, str]]:
    return [(name, spec.shape, spec.dtype) for name, spec in sorted(specs.items())]


def _shard_key(shard: Shard) -> tuple[str, Index, Index, str, Index]:
    return shard.tensor, shard.box.start, shard.box.shape, shard.param, shard.param_start


def _pad_key(pad: Pad) -> tuple[str, Index, Index]:
    return pad.param, pad.box.start, pad.box.shape


def _check_tensors(layout: Layout) -> None:
    specs = {id(mapping): mapping for mapping in (layout.tensors, *layout.params)}
    for name, spec in (item for mapping in specs.values() for item in mapping.items()):
        if spec.dtype not in DTYPE_BYTES:
            raise LayoutError(
                f"layout {layout.name}: {name} has dtype {spec.dtype}, known are {', '.join(DTYPE_BYTES)}"
            )

    for alias, tensor in layout.tied.items():
        if alias in layout.tensors or tensor not in layout.tensors:
            raise LayoutError(f"layout {layout.name}: {alias} is tied to {tensor}: only the latter may be a tensor")


def _check_rank(layout: Layout, rank: int) -> None:
    """Check one rank: every block fits on both sides, and the blocks of each parameter tile it."""
    where = f"layout {layout.name}, rank {rank}"
    blocks: dict[str, list[tuple[Index, Index]]] = {param: [] for param in layout.params[rank]}
    contents: dict[str, list[str]] = {param: [] for param in layout.params[rank]}
    for shard in layout.shards[rank]:
        tensor = layout.tensors.get(shard.tensor)
        if tensor is None:
            raise LayoutError(f"{where}: {shard.param} holds {shard.tensor}, which is not a tensor of the layout")

        if not _is_inside(shard.box, tensor.shape):
            raise LayoutError(f"{where}: box {shard.box} is not inside {shard.tensor} of shape {tensor.shape}")

        _param_of(blocks, shard.param, shard.tensor, where).append((shard.param_start, shard.box.shape))
        contents[shard.param].append(shard.tensor)

    for pad in layout.pads[rank]:
        _param_of(blocks, pad.param, "padding", where).append((pad.box.start, pad.box.shape))
        contents[pad.param].append("padding")

    for param, found in blocks.items():
        problem = _tiling_problem(layout.params[rank][param].shape, tuple(found))
        if problem is not None:
            content = "" if problem.block is None else f"{contents[param][problem.block]} at "
            raise LayoutError(f"{where}: {param}: {content}{problem.text}")


def _param_of(blocks: dict[str, _Value], param: str, content: str, where: str) -> _Value:
    found = blocks.get(param)
    if found is None:
        raise LayoutError(f"{where}: {content} lies in {param}, which this rank does not have")

    return found


@lru_cache(maxsize=1 << 14)  # layers and experts repeat the same few boxes
def _is_inside(box: Box, shape: Index) -> bool:
    return (
        len(box.start) == len(box.shape) == len(shape)
        and all(size > 0 for size in box.shape)
        and all(start >= 0 for start in box.start)
        and all(stop <= size for stop, size in zip(box.stop, shape, strict=True))
    )


class _Problem(NamedTuple):
    """Why blocks do not tile a parameter; `block` is the position of the one to blame, if it is one."""

    text: str
    block: int | None = None


@lru_cache(maxsize=1 << 10)  # all layers, and mostly all ranks, have parameters of the same few patterns
def _tiling_problem(shape: Index, blocks: tuple[tuple[Index, Index], ...]) -> _Problem | None:
    """Return None if blocks (start, shape without extra leading dims) cover a parameter exactly once."""
    boxes: list[Box] = []
    for position, (start, size) in enumerate(blocks):
        box = Box(start, (1,) * (len(start) - len(size)) + size)
        if not _is_inside(box, shape):
            return _Problem(f"{box} is not inside the shape {shape}", position)

        boxes.append(box)

    boxes.sort(key=lambda box: (box.start, box.shape))
    covered, num_elements = sum(box.num_elements for box in boxes), math.prod(shape)
    if covered != num_elements:
        return _Problem(f"shards and pads cover {covered} of {num_elements} elements")

    # Neighbours in row order are compared first (nearly always enough to be sure: they follow one another in dim 0).
    if all(first.stop[:1] <= second.start[:1] for first, second in pairwise(boxes)):
        return None

    for position, first in enumerate(boxes):
        for second in boxes[position + 1 :]:
            if second.start[:1] >= first.stop[:1]:
                break

            if first.intersect(second) is not None:
                return _Problem(f"{first} and {second} overlap")
    return None
