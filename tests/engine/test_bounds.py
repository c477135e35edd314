"""The figures of small plans, by hand."""

from __future__ import annotations

from engine.bounds import best_busiest, lower_bound, plan_figures
from engine.layout import Box, Layout, Shard, TensorSpec
from engine.placement import Placement
from engine.plan import make_plan


def rows(name: str, ranks: list[list[tuple[int, int]]], dtype: str = "float32") -> Layout:
    """Ranks that hold rows [first, last) of one [8, 4] tensor, each stretch as a parameter of its own."""
    tensors = {"w": TensorSpec((8, 4), dtype)}
    params = tuple(
        {f"{first}": TensorSpec((last - first, 4), dtype) for first, last in stretches} for stretches in ranks
    )
    shards = tuple(
        tuple(Shard("w", Box((first, 0), (last - first, 4)), f"{first}", (0, 0)) for first, last in stretches)
        for stretches in ranks
    )
    return Layout(name, tensors, params, shards, ((),) * len(ranks), {})


def test_disaggregated_figures() -> None:
    """Two ranks need all 128 and 64 bytes; rows 0-3 have two holders, rows 4-7 one."""
    source = rows("train", [[(0, 4)], [(0, 4)], [(4, 8)]])
    target = rows("infer", [[(0, 8)], [(2, 6)]])
    figures = plan_figures(make_plan(source, target, bucket_bytes=16))
    assert figures.received == figures.bound == (128, 64)
    assert figures.kept == (0, 0)
    assert figures.sent == (48, 48, 96)
    assert figures.best_busiest == 96  # rank 2 alone has rows 4-7, 64 bytes for one and 32 for the other
    assert figures.busiest_over_best == figures.bytes_over_bound == 1.0
    assert (figures.receiver_bytes, figures.full_source, figures.full_target) == (128, 96, 128)
    assert (figures.bounded_source, figures.bounded_target) == (32, 32)
    assert figures.num_buckets == figures.num_copies == 12
    assert figures.between_nodes == 0


def test_what_the_device_holds_is_not_in_the_bound() -> None:
    source, target = rows("train", [[(0, 4), (2, 6)], [(6, 8)]]), rows("infer", [[(0, 8)], [(0, 8)]])
    place = Placement(source_devices=(0, 1), target_devices=(0, 1), device_nodes=(0, 1))
    assert lower_bound(source, target) == (128, 128)
    assert lower_bound(source, target, place) == (32, 96)
    figures = plan_figures(make_plan(source, target, bucket_bytes=1 << 10, placement=place))
    assert figures.received == (32, 96)
    assert figures.kept == (96, 32)
    assert figures.between_nodes == 128
    assert best_busiest(source, target, place) == 96


def test_a_float32_parameter_counts_as_such() -> None:
    source, target = rows("train", [[(0, 8)]], "bfloat16"), rows("infer", [[(0, 8)]], "float32")
    assert lower_bound(source, target) == (128,)
    assert plan_figures(make_plan(source, target, bucket_bytes=1 << 10)).sent == (128,)


def test_an_element_that_is_needed_twice_is_bound_once() -> None:
    """The planner fills both places; that this is more than needed shows in the ratio."""
    source, target = rows("train", [[(0, 8)]]), rows("infer", [[(0, 6), (4, 8)]])
    assert lower_bound(source, target) == (128,)
    assert plan_figures(make_plan(source, target, bucket_bytes=1 << 10)).bytes_over_bound == 1.25


def test_nothing_to_move_is_optimal() -> None:
    layout = rows("both", [[(0, 8)]])
    place = Placement(source_devices=(0,), target_devices=(0,), device_nodes=(0,))
    figures = plan_figures(make_plan(layout, layout, bucket_bytes=64, placement=place))
    assert figures.received == figures.bound == figures.sent == (0,)
    assert figures.busiest_over_best == figures.bytes_over_bound == 1.0
    assert figures.num_buckets == 0
    assert figures.num_copies == 1
