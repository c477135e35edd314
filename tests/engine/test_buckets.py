"""Boxes cut where balance needs it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.buckets import split_at
from engine.layout import Box

BOXES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3).map(
    lambda dims: Box(tuple(start for start, _ in dims), tuple(size for _, size in dims))
)


def elements(boxes: list[Box]) -> list[int]:
    """The elements of boxes in a [7, 7, 7] tensor, in their order."""
    numbers = np.arange(7 ** len(boxes[0].shape)).reshape((7,) * len(boxes[0].shape)) if boxes else np.zeros(0)
    return [int(number) for box in boxes for number in numbers[box.slices].ravel()]


@given(box=BOXES, count=st.integers(-1, 70), grain=st.integers(0, 20))
def test_both_parts_together_are_the_box_in_row_order(box: Box, count: int, grain: int) -> None:
    head, tail = split_at(box, count, grain)
    assert elements(head) + elements(tail) == elements([box])
    wanted = min(max(count, 0), box.num_elements)
    assert abs(len(elements(head)) - wanted) <= grain // 2


@pytest.mark.parametrize(
    ("grain", "head", "tail"),
    [
        (10, [Box((0, 0), (2, 10))], [Box((2, 0), (2, 10))]),
        (1, [Box((0, 0), (2, 10)), Box((2, 0), (1, 3))], [Box((2, 3), (1, 7)), Box((3, 0), (1, 10))]),
    ],
)
def test_rows_are_cut_only_where_they_are_large(grain: int, head: list[Box], tail: list[Box]) -> None:
    """23 of 4 x 10 elements."""
    assert split_at(Box((0, 0), (4, 10)), 23, grain) == (head, tail)
