"""Boxes, shards and layouts: the algebra against numpy, and every contradiction by its message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import Box, Layout, LayoutError, Pad, Shard, TensorSpec

SHAPE = (6, 5)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """A box inside SHAPE, never empty."""
    start = tuple(draw(st.integers(0, size - 1)) for size in SHAPE)
    return Box(start, tuple(draw(st.integers(1, size - low)) for size, low in zip(SHAPE, start, strict=True)))


def mask(*parts: Box) -> np.ndarray:
    """How often each element of SHAPE is in one of the boxes."""
    counts = np.zeros(SHAPE, dtype=int)
    for part in parts:
        counts[part.slices] += 1
    return counts


@given(first=boxes(), second=boxes())
def test_intersect_and_subtract_partition_a_box(first: Box, second: Box) -> None:
    common = first.intersect(second)
    rest = first.subtract(second)
    assert np.array_equal(mask(*rest, *([common] if common else [])), mask(first))
    assert np.array_equal(mask(common) if common else np.zeros(SHAPE), mask(first) * mask(second))


def test_a_shard_loads_with_its_two_indices() -> None:
    tensor, param = np.arange(30).reshape(6, 5), np.zeros((2, 4, 5), dtype=int)
    shard = Shard("expert.weight", Box((2, 0), (3, 5)), "stacked", (1, 1, 0))
    param[shard.param_slices] = tensor[shard.box.slices]
    assert np.array_equal(param[1, 1:], tensor[2:5])
    assert param[0].sum() == param[1, 0].sum() == 0
    assert shard.param_box == Box((1, 1, 0), (1, 3, 5))


def layout(
    *,
    shards: list[Shard] | None = None,
    pads: tuple[Pad, ...] = (),
    shape: tuple[int, ...] = (4, 3),
    dtype: str = "float32",
    tied: dict[str, str] | None = None,
    reverse: bool = False,
) -> Layout:
    """One rank with parameter `p` (and an untouched `q`), by default tensor `a` [4, 3] in two halves."""
    halves = [Shard("a", Box((row, 0), (2, 3)), "p", (row, 0)) for row in (0, 2)]
    rest = [Shard("b", Box((0,), (2,)), "q", (0,))]
    params = {"p": TensorSpec(shape, dtype), "q": TensorSpec((2,), "float32")}
    tensors = {"a": TensorSpec((4, 3), "float32"), "b": TensorSpec((2,), "float32")}
    found = [*(halves if shards is None else shards), *rest]
    if reverse:
        params, tensors, found = (dict(reversed(params.items())), dict(reversed(tensors.items())), found[::-1])
    return Layout("test", tensors, (params,), (tuple(found),), (pads,), tied or {})


def test_hash_is_of_the_content_and_not_of_its_order() -> None:
    assert layout().hash == layout(reverse=True).hash
    assert layout() == layout(reverse=True)
    others = [
        layout(shards=[Shard("a", Box((0, 0), (4, 3)), "p", (0, 0))]),
        layout(dtype="bfloat16"),
        layout(tied={"alias": "a"}),
        layout(shape=(5, 3), pads=(Pad("p", Box((4, 0), (1, 3))),)),
    ]
    assert len({layout().hash, *(other.hash for other in others)}) == 5
    assert layout().rank_bytes(0) == 12 * 4 + 2 * 4


A_WHOLE = Shard("a", Box((0, 0), (4, 3)), "p", (0, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": [A_WHOLE], "shape": (5, 3)}, "layout test, rank 0: p: shards and pads cover 12 of 15 elements"),
        ({"shards": [A_WHOLE], "pads": (Pad("p", Box((0, 0), (1, 3))),)}, "p: shards and pads cover 15 of 12"),
        ({"shards": [Shard("c", Box((0, 0), (4, 3)), "p", (0, 0))]}, "p holds c, which is not a tensor"),
        ({"shards": [Shard("a", Box((1, 0), (4, 3)), "p", (0, 0))]}, r"not inside a of shape \(4, 3\)"),
        ({"shards": [Shard("a", Box((0, 0), (4, 3)), "p", (1, 0))]}, r"p: a at .* is not inside the shape \(4, 3\)"),
        ({"shards": [Shard("a", Box((0, 0), (4, 3)), "r", (0, 0))]}, "a lies in r, which this rank does not have"),
        ({"dtype": "int4"}, "p has dtype int4, known are float64, float32"),
        ({"tied": {"a": "b"}}, "a is tied to b"),
        ({"tied": {"alias": "c"}}, "alias is tied to c"),
    ],
)
def test_contradictions_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        layout(**changes)  # type: ignore[arg-type]


def test_overlaps_are_found_when_the_sizes_add_up() -> None:
    left = Shard("a", Box((0, 0), (4, 2)), "p", (0, 0))
    twice = Shard("a", Box((0, 0), (2, 2)), "p", (1, 1))
    with pytest.raises(LayoutError, match=r"p: Box.* and Box.* overlap"):
        layout(shards=[left, twice])


def test_numbers_of_ranks_must_agree() -> None:
    with pytest.raises(LayoutError, match="params 1, shards 2, pads 1"):
        Layout("test", {}, ({},), ((), ()), ((),), {})
