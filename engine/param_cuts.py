"""One rank's part of a parameter, and how the parts of all parameters become a `Layout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from engine.family_types import Cut, Row
from engine.layout import Box, Index, Layout, Pad, Shard, TensorSpec
from engine.model_shape import ModelShape, divide


class Part(NamedTuple):
    """Rows [start, start + num_rows) of one tensor of a `Row`."""

    tensor: str
    start: int
    num_rows: int


class Block(NamedTuple):
    """A box of one tensor in a parameter; `tensor` still with `{layer}` and `{expert}`."""

    tensor: str
    box: Box
    param_start: Index
    expert: int = 0


@dataclass(frozen=True, slots=True)
class LocalParam:
    """One rank's parameter of a `Row`: the same for every layer that has it."""

    spec: TensorSpec
    blocks: tuple[Block, ...]
    pads: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class RankContent:
    """What one rank holds; ranks that hold the same share it."""

    params: Mapping[str, TensorSpec]
    shards: tuple[Shard, ...]
    pads: tuple[Pad, ...]


class ContentBuilder:
    """Collects the parameters of one rank."""

    def __init__(self, model: ModelShape) -> None:
        self._tied = model.tied
        self._params: dict[str, TensorSpec] = {}
        self._shards: list[Shard] = []
        self._pads: list[Pad] = []

    def add(self, param: str, local: LocalParam, *, layer: int = 0, first_expert: int = 0) -> None:
        """Add one parameter under its final name; a tied alias becomes a holder of the tensor that it is tied to.

        Args:
            param: its name on this rank.
            local: this rank's part.
            layer: global number of the layer.
            first_expert: global number of the expert that `local` calls 0.
        """
        param = intern(param)
        self._params[param] = local.spec
        for tensor, box, start, expert in local.blocks:
            name = self._tied.get(tensor, tensor).format(layer=layer, expert=first_expert + expert)
            self._shards.append(Shard(intern(name), box, param, start))
        self._pads.extend(Pad(param, box) for box in local.pads)

    def build(self) -> RankContent:
        """Return what was added."""
        return RankContent(self._params, tuple(self._shards), tuple(self._pads))


def make_layout(name: str, model: ModelShape, ranks: Sequence[RankContent]) -> Layout:
    """Return the layout of ranks, in order; contents that are one object stay shared."""
    return Layout(
        name,
        model.tensors,
        tuple(rank.params for rank in ranks),
        tuple(rank.shards for rank in ranks),
        tuple(rank.pads for rank in ranks),
        model.tied,
        model.family.verified,
    )


def cut_param(model: ModelShape, row: Row, tp: int, rank: int, *, vocabulary_multiple: int, where: str) -> LocalParam:
    """Return a tensor-parallel rank's part of what both sides cut alike (everything but the fused q, k and v).

    Args:
        model: whose sizes count.
        row: the parameter; of experts, one of them.
        tp, rank: the axis that cuts it.
        vocabulary_multiple: rows are padded to a multiple of this.
        where: "vllm tp" for instance: which axis, for messages.
    """
    shapes = {tensor: model.row_shape(row, tensor) for tensor in row.tensors}
    if row.cut is Cut.REPLICATED:
        return stack(model, row, [Part(tensor, 0, shape[0]) for tensor, shape in shapes.items()])

    if row.cut is Cut.ROWS:
        sizes = {tensor: _cut_size(model, row, tensor, 0, tp, where) for tensor in shapes}
        return stack(model, row, [Part(tensor, rank * size, size) for tensor, size in sizes.items()])

    ((tensor, shape),) = shapes.items()
    if row.cut is Cut.COLUMNS:
        local = (shape[0], _cut_size(model, row, tensor, 1, tp, where))
        block = Block(tensor, make_box((0, rank * local[1]), local), (0, 0))
        return LocalParam(TensorSpec(local, model.row_dtype(row)), (block,))

    assert row.cut is Cut.VOCABULARY, row.cut
    padded = -(-shape[0] // vocabulary_multiple) * vocabulary_multiple
    size = divide(padded, tp, f"{where}={tp}: {tensor} rows, padded to a multiple of {vocabulary_multiple},")
    num_rows = min(max(shape[0] - rank * size, 0), size)
    return stack(model, row, [Part(tensor, rank * size, num_rows)] if num_rows else [], num_rows=size)


def _cut_size(model: ModelShape, row: Row, tensor: str, dim: int, tp: int, where: str) -> int:
    """Return a rank's share of one dim; where the row says so, of whole heads only."""
    size = model.row_shape(row, tensor)[dim]
    if row.heads is not None:
        head = model.sizes[row.heads]
        return divide(size // head, tp, f"{where}={tp}: {tensor} heads") * head

    return divide(size, tp, f"{where}={tp}: {tensor} {('rows', 'columns')[dim]}")


def stack(model: ModelShape, row: Row, parts: Sequence[Part], num_rows: int | None = None) -> LocalParam:
    """Put parts under one another in dim 0; what is left of `num_rows` below them is padding."""
    columns = model.row_shape(row, next(iter(row.tensors)))[1:]
    origin = (0,) * len(columns)
    blocks: list[Block] = []
    top = 0
    for part in parts:
        box = make_box((part.start, *origin), (part.num_rows, *columns))
        blocks.append(Block(part.tensor, box, (top, *origin)))
        top += part.num_rows

    height = top if num_rows is None else num_rows
    pads = (make_box((top, *origin), (height - top, *columns)),) if height > top else ()
    return LocalParam(TensorSpec((height, *columns), model.row_dtype(row)), tuple(blocks), pads)


def stack_experts(local: LocalParam, num_experts: int) -> LocalParam:
    """Return `num_experts` equal parameters in one with a leading dim (vLLM's w13 and w2).

    Example: of 2 experts with [6, 4] each a rank holds [2, 6, 4]; the second's block at (3, 0) is at (1, 3, 0).
    """
    assert not local.pads, "experts are never padded"
    blocks = tuple(
        block._replace(param_start=(expert, *block.param_start), expert=expert)
        for expert in range(num_experts)
        for block in local.blocks
    )
    return LocalParam(replace(local.spec, shape=(num_experts, *local.spec.shape)), blocks)


@lru_cache(maxsize=1 << 12)
def make_box(start: Index, shape: Index) -> Box:
    """Return a box; equal ones share an object, since large layouts hold each many times."""
    return Box(start, shape)
