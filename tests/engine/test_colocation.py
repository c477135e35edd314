"""Ranks on devices: the assignment, HybridFlow's volume, and which holder is near."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bounds import lower_bound, plan_figures
from engine.colocation import assign, place_colocated
from engine.families import megatron_layout, vllm_layout
from engine.layout import Box, Layout, LayoutError, Shard, TensorSpec
from engine.pieces import kept_bytes
from engine.placement import Placement, repeated
from engine.plan import make_plan

NUM_LAYERS = 8
SHAPE = (16, 16)


@given(
    cost=st.integers(1, 5).flatmap(
        lambda columns: st.lists(
            st.lists(st.integers(-9, 9), min_size=columns, max_size=columns), min_size=1, max_size=columns
        )
    )
)
def test_the_assignment_is_the_cheapest(cost: list[list[int]]) -> None:
    table = np.array(cost, dtype=np.int64)
    chosen = assign(table)
    assert len(set(chosen.tolist())) == len(cost)
    orders = permutations(range(table.shape[1]), len(cost))
    totals = [sum(row[column] for row, column in zip(cost, order, strict=True)) for order in orders]
    assert table[np.arange(len(cost)), chosen].sum() == min(totals)


def columns_and_rows(name: str, ranks: list[tuple[int, int]], pp: int, tp: int) -> Layout:
    """A model of one column- and one row-parallel matrix a layer; `ranks` are (pipeline, tensor) coordinates."""
    tensors = {
        f"{kind}{layer}": TensorSpec(SHAPE, "bfloat16") for layer in range(NUM_LAYERS) for kind in ("col", "row")
    }
    params, shards = [], []
    for pipeline, tensor in ranks:
        specs, held = {}, []
        for layer in range(NUM_LAYERS // pp * pipeline, NUM_LAYERS // pp * (pipeline + 1)):
            for kind, dim in (("col", 0), ("row", 1)):
                shape = tuple(size // tp if dim == axis else size for axis, size in enumerate(SHAPE))
                start = tuple(size // tp * tensor if dim == axis else 0 for axis, size in enumerate(SHAPE))
                specs[f"{kind}{layer}"] = TensorSpec(shape, "bfloat16")
                held.append(Shard(f"{kind}{layer}", Box(start, shape), f"{kind}{layer}", (0, 0)))
        params.append(specs)
        shards.append(tuple(held))
    return Layout(name, tensors, tuple(params), tuple(shards), ((),) * len(ranks), {})


NESTED = [  # p, t, d of training, p_g, t_g of generation: sizes that divide
    (1, 4, 2, 1, 2),  # the paper's own picture: 1-4-2 to 1-2-2-2
    (1, 8, 1, 1, 2),
    (1, 8, 1, 1, 4),
    (2, 4, 1, 1, 2),
    (2, 4, 2, 2, 2),
    (4, 8, 1, 1, 8),
    (4, 8, 1, 1, 4),
    (4, 2, 1, 1, 2),
    (2, 2, 2, 1, 1),
]


@pytest.mark.parametrize(("p", "t", "d", "pg", "tg"), NESTED)
def test_nested_layouts_move_hybridflows_volume(p: int, t: int, d: int, pg: int, tg: int) -> None:
    """(tp - tg pg) / (tg pg t p) M on every device, exactly: arXiv 2409.19256, section 5.3."""
    source = columns_and_rows("train", [(pipe, ten) for pipe, _, ten in product(range(p), range(d), range(t))], p, t)
    replica = columns_and_rows("infer", list(product(range(pg), range(tg))), pg, tg)
    target = repeated(replica, p * t * d // (pg * tg))
    placement = place_colocated(source, target)
    plan = make_plan(source, target, bucket_bytes=256, placement=placement)

    model_bytes = 2 * NUM_LAYERS * 2 * SHAPE[0] * SHAPE[1]
    volume = Fraction(t * p - tg * pg, tg * pg * t * p) * model_bytes
    moved = [plan.target_bytes(rank) for rank in range(target.num_ranks)]
    assert moved == [volume] * target.num_ranks
    assert moved == list(lower_bound(source, target, placement))
    assert sum(part.num_bytes for part in plan.local) + plan.num_bytes == sum(map(target.rank_bytes, range(p * t * d)))
    assert plan_figures(plan).busiest_over_best <= 1.05


def test_vllms_own_order_keeps_less() -> None:
    """1-4-2 to 1-2-2-2 with rank r on device r: half of the devices keep nothing of what they hold."""
    source = columns_and_rows("train", [(0, tensor) for _, tensor in product(range(2), range(4))], 1, 4)
    target = repeated(columns_and_rows("infer", [(0, 0), (0, 1)], 1, 2), 4)
    devices = tuple(range(8))
    contiguous = Placement(source_devices=devices, target_devices=devices, device_nodes=(0,) * 8)
    model_bytes = 2 * NUM_LAYERS * 2 * SHAPE[0] * SHAPE[1]
    assert sum(lower_bound(source, target, contiguous)) == 8 * model_bytes * 3 // 8
    assert sum(lower_bound(source, target, place_colocated(source, target))) == 8 * model_bytes * 2 // 8


def test_the_mapping_of_a_real_family_keeps_the_replicated_part_too(make_config: Callable[..., Any]) -> None:
    """Norms lie on every rank of a stage, so a real model moves less than the formula says of its bytes."""
    config = make_config(vocab_size=256, num_key_value_heads=4, hidden_size=32, tie_word_embeddings=False)
    source, target = megatron_layout(config, tp=4, pp=1, dp=1), repeated(vllm_layout(config, tp=2), 2)
    moved = sum(lower_bound(source, target, place_colocated(source, target)))
    norms = sum(spec.num_bytes for name, spec in source.tensors.items() if "norm" in name)
    model_bytes = sum(spec.num_bytes for spec in source.tensors.values())
    assert moved == 4 * Fraction(4 - 2, 2 * 4) * (model_bytes - norms)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "target_tp", "replicas"), [(2, 1, 2, 4, 1), (1, 2, 2, 2, 2), (4, 1, 1, 1, 4)]
)
def test_the_mapping_is_the_best_of_all(
    make_config: Callable[..., Any], tp: int, pp: int, dp: int, target_tp: int, replicas: int
) -> None:
    """Layouts that are not nested, against every order of four ranks."""
    config = make_config(num_key_value_heads=4)
    source, target = megatron_layout(config, tp=tp, pp=pp, dp=dp), repeated(vllm_layout(config, tp=target_tp), replicas)
    best = min(
        sum(
            lower_bound(
                source, target, Placement(source_devices=(0, 1, 2, 3), target_devices=order, device_nodes=(0,) * 4)
            )
        )
        for order in permutations(range(4))
    )
    assert sum(lower_bound(source, target, place_colocated(source, target))) == best


def test_kept_bytes_is_the_common_part(make_config: Callable[..., Any]) -> None:
    config = make_config(vocab_size=64)
    source, target = megatron_layout(config, tp=2, pp=1, dp=2), vllm_layout(config, tp=1)
    whole = target.rank_bytes(0)
    kept = kept_bytes(source, target)
    assert kept.shape == (1, 4)
    moved = [
        lower_bound(source, target, Placement(source_devices=(0, 1, 2, 3), target_devices=(d,), device_nodes=(0,) * 4))
        for d in range(4)
    ]
    assert [whole - bound for (bound,) in moved] == kept[0].tolist()


def test_sources_are_self_then_node_then_remote(make_config: Callable[..., Any]) -> None:
    """Four data-parallel holders of everything: a device takes nothing, its node's other one is not disturbed."""
    config = make_config()
    source, target = megatron_layout(config, tp=1, pp=1, dp=4), repeated(vllm_layout(config, tp=1), 3)
    placement = Placement(source_devices=(0, 1, 2, 3), target_devices=(1, 4, 5), device_nodes=(0, 0, 1, 1, 1, 2))
    plan = make_plan(source, target, bucket_bytes=1 << 20, placement=placement)
    assert [(part.source_rank, part.target_rank) for part in plan.local] == [(1, 0)]
    senders = {rank: {bucket.source_rank for bucket in plan.buckets_of_target(rank)} for rank in range(3)}
    assert senders[0] == set()
    assert senders[1] <= {2, 3}  # node 1
    assert senders[2] <= {0, 1, 2, 3}  # nobody on node 2: anybody
    assert plan_figures(plan).between_nodes == plan.target_bytes(2)
    assert plan_figures(plan).busiest_over_best <= 1.05


def test_a_plan_with_a_placement_has_a_hash_of_its_own(make_config: Callable[..., Any]) -> None:
    config = make_config()
    source, target = megatron_layout(config, tp=1, pp=1, dp=2), vllm_layout(config, tp=2)
    nodes = [
        Placement(source_devices=(0, 1), target_devices=(2, 3), device_nodes=n) for n in ((0, 0, 0, 0), (0, 1, 0, 1))
    ]
    hashes = [make_plan(source, target, bucket_bytes=512, placement=place).hash for place in (None, *nodes)]
    assert len(set(hashes)) == 3


def test_bad_placements_are_named(make_config: Callable[..., Any]) -> None:
    config = make_config()
    source, target = megatron_layout(config, tp=1, pp=1, dp=1), vllm_layout(config, tp=2)
    with pytest.raises(LayoutError, match="target rank 1 is on device 7, but there are 2 devices"):
        Placement(source_devices=(0,), target_devices=(1, 7), device_nodes=(0, 0))
    place = Placement(source_devices=(0,), target_devices=(1,), device_nodes=(0, 0))
    with pytest.raises(LayoutError, match="vllm tp=2 has 2 ranks, the placement places 1"):
        make_plan(source, target, bucket_bytes=64, placement=place)
    with pytest.raises(LayoutError, match="vllm tp=2 has 2 ranks for 1 devices"):
        place_colocated(source, target)
    with pytest.raises(LayoutError, match="replicas must be >= 1, got 0"):
        repeated(target, 0)
