"""Shares of senders against Hall's bound, taken over all subsets of the holders one by one."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.balance import HolderClass, busiest, fair_shares


def hall_bound(classes: list[HolderClass]) -> int:
    """The busiest holder's least: what can only come from a set of ranks, over its size; the worst of all sets."""
    ranks = sorted({rank for item in classes for rank in item.ranks})
    subsets = [set(chosen) for size in range(1, len(ranks) + 1) for chosen in combinations(ranks, size)]
    forced = [
        (sum(item.num_bytes for item in classes if chosen.issuperset(item.ranks)), len(chosen)) for chosen in subsets
    ]
    return max(-(-num_bytes // size) for num_bytes, size in forced)


def loads_of(classes: list[HolderClass]) -> Counter[int]:
    loads = Counter[int]()
    for share in fair_shares(classes):
        loads.update(share)
    return loads


CLASSES = st.lists(
    st.builds(
        HolderClass, st.sets(st.integers(0, 5), min_size=1).map(lambda ranks: tuple(sorted(ranks))), st.integers(0, 60)
    ),
    min_size=1,
    max_size=8,
)


@given(classes=CLASSES)
def test_the_busiest_holder_has_the_least_possible(classes: list[HolderClass]) -> None:
    for item, share in zip(classes, fair_shares(classes), strict=True):
        assert sum(share.values()) == item.num_bytes
        assert set(share) <= set(item.ranks)
        assert all(share.values())

    assert max(loads_of(classes).values(), default=0) == busiest(classes) == hall_bound(classes)


@pytest.mark.parametrize(
    ("classes", "loads"),
    [
        ([((0, 1), 8), ((0,), 4)], [6, 6]),
        ([((0, 1), 8), ((0,), 20)], [20, 8]),
        ([((0, 1), 8), ((1, 2), 8), ((0, 2), 2)], [6, 6, 6]),  # no two sets are nested
        ([((0,), 10), ((1, 2), 2), ((0, 1, 2), 4)], [10, 3, 3]),  # who is not the busiest is levelled too
        ([((0, 1, 2), 7), ((0,), 18), ((0, 1, 3), 19)], [18, 9, 7, 10]),  # and takes nothing more from the busiest
        ([((0, 1, 2), 0), ((3,), 5)], [0, 0, 0, 5]),
    ],
)
def test_all_loads_are_levelled(classes: list[tuple[tuple[int, ...], int]], loads: list[int]) -> None:
    found = loads_of([HolderClass(*item) for item in classes])
    assert [found[rank] for rank in range(len(loads))] == loads
