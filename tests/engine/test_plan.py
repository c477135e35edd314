"""The planner on random layouts, executed with numpy: every needed element exactly once, and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.buckets import BucketSpec
from engine.families import canonical_layout, megatron_layout, vllm_layout
from engine.layout import DTYPE_BYTES, Box, Layout, Pad, Shard, TensorSpec
from engine.plan import Plan, PlanError, make_plan

SHAPES = {"a": (6, 5), "b": (7,), "c": (2, 3, 4)}


def tiles(draw: st.DrawFn, box: Box) -> list[Box]:
    """Cut a box into boxes at random."""
    dims = [dim for dim, size in enumerate(box.shape) if size > 1]
    if not dims or not draw(st.booleans()):
        return [box]

    dim = draw(st.sampled_from(dims))
    size = draw(st.integers(1, box.shape[dim] - 1))

    def part(start: int, length: int) -> Box:
        def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
            return (*values[:dim], value, *values[dim + 1 :])

        return Box(put(box.start, start), put(box.shape, length))

    halves = part(box.start[dim], size), part(box.start[dim] + size, box.shape[dim] - size)
    return [tile for half in halves for tile in tiles(draw, half)]


def layout_of(name: str, blocks: list[list[tuple[str, Box]]], dtype: str = "float32") -> Layout:
    """A layout whose parameters hold one block each, stacked under one leading dim, with one padded line below."""
    params, shards, pads = [], [], []
    for rank in blocks:
        specs, held, padding = {}, [], []
        for number, (tensor, box) in enumerate(rank):
            param = f"param{number:02d}"
            specs[param] = TensorSpec((2, *box.shape), dtype)
            held.append(Shard(tensor, box, param, (1, *(0 for _ in box.shape))))
            padding.append(Pad(param, Box((0, *(0 for _ in box.shape)), (1, *box.shape))))
        params.append(specs)
        shards.append(tuple(held))
        pads.append(tuple(padding))
    tensors = {tensor: TensorSpec(shape, dtype) for tensor, shape in SHAPES.items()}
    return Layout(name, tensors, tuple(params), tuple(shards), tuple(pads), {})


@st.composite
def sources(draw: st.DrawFn) -> Layout:
    """Every tensor cut at random, each piece on some of three ranks; some tensors a second time, cut otherwise."""
    blocks: list[list[tuple[str, Box]]] = [[], [], []]
    for tensor, shape in SHAPES.items():
        for _ in range(draw(st.integers(1, 2))):
            for box in tiles(draw, Box((0,) * len(shape), shape)):
                for rank in draw(st.sets(st.integers(0, 2), min_size=1)):
                    blocks[rank].append((tensor, box))
    return layout_of("source", blocks)


@st.composite
def targets(draw: st.DrawFn) -> Layout:
    """Two ranks, each with some of the pieces of every tensor."""
    blocks: list[list[tuple[str, Box]]] = [[], []]
    for rank in blocks:
        for tensor, shape in SHAPES.items():
            rank += [(tensor, box) for box in tiles(draw, Box((0,) * len(shape), shape)) if draw(st.booleans())]
    return layout_of("target", blocks)


def executed(plan: Plan) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
    """Move numbers through the buckets; return what the target ranks hold and how often each element was written.

    Source elements carry their place in the tensor, source padding -1; targets start at -2.
    """
    values = {
        name: np.arange(spec.num_elements).reshape(spec.shape) + 1000 * number
        for number, (name, spec) in enumerate(sorted(plan.source.tensors.items()))
    }
    held = [{name: np.full(spec.shape, -1) for name, spec in rank.items()} for rank in plan.source.params]
    for params, shards in zip(held, plan.source.shards, strict=True):
        for shard in shards:
            params[shard.param][shard.param_slices] = values[shard.tensor][shard.box.slices]

    found = [{name: np.full(spec.shape, -2) for name, spec in rank.items()} for rank in plan.target.params]
    counts = [{name: np.zeros(spec.shape, dtype=int) for name, spec in rank.items()} for rank in plan.target.params]
    for bucket in plan.buckets:
        payload = packed(bucket, held[bucket.source_rank])
        for run in bucket.target_runs:
            block = payload[run.offset : run.offset + run.box.num_elements].reshape(run.box.shape)
            found[bucket.target_rank][run.param][run.box.slices] = block
            counts[bucket.target_rank][run.param][run.box.slices] += 1
    return found, counts


def packed(bucket: BucketSpec, params: dict[str, np.ndarray]) -> np.ndarray:
    """The payload of a bucket, by its source runs; every element of it is written exactly once."""
    payload = np.full(bucket.num_elements, -3)
    for run in bucket.source_runs:
        part = payload[run.offset : run.offset + run.box.num_elements]
        assert (part == -3).all()
        part[:] = params[run.param][run.box.slices].ravel()
    assert (payload != -3).all()
    return payload


def assert_delivers(plan: Plan) -> None:
    """Full coverage with the right values; padding untouched."""
    found, counts = executed(plan)
    values = {
        name: np.arange(spec.num_elements).reshape(spec.shape) + 1000 * number
        for number, (name, spec) in enumerate(sorted(plan.target.tensors.items()))
    }
    for rank, params in enumerate(found):
        for shard in plan.target.shards[rank]:
            assert np.array_equal(params[shard.param][shard.param_slices], values[shard.tensor][shard.box.slices])
            assert (counts[rank][shard.param][shard.param_slices] == 1).all()

        for pad in plan.target.pads[rank]:
            assert (params[pad.param][pad.box.slices] == -2).all()
            assert (counts[rank][pad.param][pad.box.slices] == 0).all()


def needed_bytes(layout: Layout, rank: int) -> int:
    """What a rank must receive: all it holds but the padding."""
    held = layout.shards[rank]
    return sum(s.box.num_elements * DTYPE_BYTES[layout.params[rank][s.param].dtype] for s in held)


BUCKET_BYTES = st.sampled_from([4, 8, 12, 20, 52, 1 << 20])


@given(source=sources(), target=targets(), bucket_bytes=BUCKET_BYTES)
def test_full_coverage(source: Layout, target: Layout, bucket_bytes: int) -> None:
    """Every element of every target parameter exactly once, from wherever it is, declared fill aside."""
    assert_delivers(make_plan(source, target, bucket_bytes=bucket_bytes))


@given(source=sources(), target=targets(), bucket_bytes=BUCKET_BYTES)
def test_no_over_fetch(source: Layout, target: Layout, bucket_bytes: int) -> None:
    """Bytes moved are the bytes that each receiver needs; buckets are dense, numbered without gaps, not too large."""
    plan = make_plan(source, target, bucket_bytes=bucket_bytes)
    for rank in range(target.num_ranks):
        assert plan.target_bytes(rank) == needed_bytes(target, rank)

    assert plan.num_bytes == sum(plan.source_bytes(rank) for rank in range(source.num_ranks))
    assert [bucket.id for bucket in plan.buckets] == list(range(plan.num_buckets))
    for bucket in plan.buckets:
        assert 0 < bucket.num_bytes <= bucket_bytes
        assert sum(copy.box.num_elements for copy in bucket.copies) == bucket.num_elements


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("target_tp", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [60, 4096, 1 << 20])
def test_full_coverage_of_qwen2(
    make_config: Callable[..., Any], tp: int, pp: int, dp: int, target_tp: int, bucket_bytes: int, *, tied: bool
) -> None:
    config = make_config(tie_word_embeddings=tied)
    target = vllm_layout(config, tp=target_tp, dtype="bfloat16")
    plan = make_plan(megatron_layout(config, tp=tp, pp=pp, dp=dp), target, bucket_bytes=bucket_bytes)
    assert_delivers(plan)
    assert [plan.target_bytes(rank) for rank in range(target_tp)] == [needed_bytes(target, r) for r in range(target_tp)]


def test_an_export_is_a_plan_too(make_config: Callable[..., Any]) -> None:
    config = make_config()
    assert_delivers(
        make_plan(megatron_layout(config, tp=2, pp=2, dp=2), canonical_layout(config), bucket_bytes=1 << 20)
    )


def test_rows_stay_whole_unless_one_is_larger_than_a_bucket(make_config: Callable[..., Any]) -> None:
    config = make_config(hidden_size=16)
    source, target = megatron_layout(config, tp=1, pp=1, dp=1), vllm_layout(config, tp=1)
    row_bytes = 16 * 4
    whole, cut = (make_plan(source, target, bucket_bytes=size) for size in (row_bytes * 7 // 2, row_bytes // 2))
    embedding = "model.embed_tokens.weight"
    assert {c.box.shape[1] for b in whole.buckets for c in b.copies if c.tensor == embedding} == {16}
    assert {c.box.shape for b in cut.buckets for c in b.copies if c.tensor == embedding} == {(1, 8)}


def test_copies_are_coalesced_to_the_fewest_runs(make_config: Callable[..., Any]) -> None:
    """One copy per canonical tensor and key-value group; on the target side one run per parameter."""
    config = make_config(num_key_value_heads=2, num_hidden_layers=2)
    plan = make_plan(megatron_layout(config, tp=1, pp=1, dp=1), vllm_layout(config, tp=1), bucket_bytes=1 << 20)
    (bucket,) = plan.buckets
    copies = Counter(copy.tensor.split(".")[-2] for copy in bucket.copies)
    per_layer = {
        "q_proj": 2 * 2,
        "k_proj": 2 * 2,
        "v_proj": 2 * 2,
        "gate_proj": 1,
        "up_proj": 1,
        "o_proj": 1,
        "down_proj": 1,
    }
    norms = {"input_layernorm": 1, "post_attention_layernorm": 1}
    assert copies == {name: 2 * count for name, count in (per_layer | norms).items()} | {"embed_tokens": 1, "norm": 1}
    assert len(bucket.target_runs) == len(plan.target.params[0])


def test_neighbouring_pieces_of_one_source_become_one_copy() -> None:
    rows = [("a", Box((row, 0), (1, 5))) for row in range(6)]
    others = [("b", Box((0,), (7,))), ("c", Box((0, 0, 0), (2, 3, 4)))]
    params = {
        "p": TensorSpec((6, 5), "float32"),
        "q": TensorSpec((7,), "float32"),
        "r": TensorSpec((2, 3, 4), "float32"),
    }
    held = [Shard(tensor, box, "p", box.start) for tensor, box in rows]
    held += [Shard(tensor, box, param, box.start) for (tensor, box), param in zip(others, "qr", strict=True)]
    tensors = {tensor: TensorSpec(shape, "float32") for tensor, shape in SHAPES.items()}
    source = Layout("rows", tensors, (params,), (tuple(held),), ((),), {})
    plan = make_plan(source, source, bucket_bytes=1 << 20)
    assert [copy.box.shape for copy in plan.buckets[0].copies] == [(6, 5), (7,), (2, 3, 4)]


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 2), (2, 1, 2), (1, 2, 4), (2, 2, 2)])
def test_sources_are_balanced_over_their_holders(make_config: Callable[..., Any], tp: int, pp: int, dp: int) -> None:
    """The busiest source rank is within 5% of the best that its stage's holders allow."""
    config = make_config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=320, tie_word_embeddings=False
    )
    source, target = megatron_layout(config, tp=tp, pp=pp, dp=dp), vllm_layout(config, tp=2)
    plan = make_plan(source, target, bucket_bytes=2048)
    per_stage = tp * dp
    loads = [plan.source_bytes(rank) for rank in range(source.num_ranks)]
    for stage in range(pp):
        stage_loads = loads[stage * per_stage : (stage + 1) * per_stage]
        assert max(stage_loads) <= 1.05 * sum(stage_loads) / per_stage


@pytest.mark.parametrize(
    ("held", "loads"),
    [
        ([("a", 8, (0, 1)), ("b", 8, (0,))], [32, 32]),  # what has no choice goes first
        ([("a", 4, (0, 1)), ("b", 4, (0, 1)), ("c", 8, (0, 1))], [32, 32]),  # large before small
    ],
)
def test_the_order_of_choosing_sources(held: list[tuple[str, int, tuple[int, ...]]], loads: list[int]) -> None:
    def whole(name: str, ranks: list[list[tuple[str, int]]]) -> Layout:
        return Layout(
            name,
            {tensor: TensorSpec((size,), "float32") for tensor, size, _ in held},
            tuple({tensor: TensorSpec((size,), "float32") for tensor, size in rank} for rank in ranks),
            tuple(tuple(Shard(tensor, Box((0,), (size,)), tensor, (0,)) for tensor, size in rank) for rank in ranks),
            tuple(() for _ in ranks),
            {},
        )

    source = whole("source", [[(tensor, size) for tensor, size, ranks in held if rank in ranks] for rank in (0, 1)])
    plan = make_plan(source, whole("target", [[(tensor, size) for tensor, size, _ in held]]), bucket_bytes=1024)
    assert [plan.source_bytes(rank) for rank in (0, 1)] == loads


def test_tied_embeddings_are_taken_from_both_stages(make_config: Callable[..., Any]) -> None:
    config = make_config(vocab_size=2000, hidden_size=16)
    plan = make_plan(megatron_layout(config, tp=1, pp=2, dp=1), vllm_layout(config, tp=1), bucket_bytes=1024)
    loads = [plan.source_bytes(rank) for rank in (0, 1)]
    assert max(loads) <= 1.05 * sum(loads) / 2


HASH_SCRIPT = """
import json, sys
from engine.families import megatron_layout, vllm_layout
from engine.plan import make_plan
config = dict(reversed(json.loads(sys.argv[1]).items()))
print(make_plan(megatron_layout(config, tp=2, pp=2, dp=2), vllm_layout(config, tp=2), bucket_bytes=4096).hash)
"""


def test_hash_is_the_same_in_every_process_and_dict_order(make_config: Callable[..., Any]) -> None:
    config = make_config()
    source, target = megatron_layout(config, tp=2, pp=2, dp=2), vllm_layout(config, tp=2)
    plan = make_plan(source, target, bucket_bytes=4096)
    turned = make_plan(turned_round(source), turned_round(target), bucket_bytes=4096)
    assert turned.buckets == plan.buckets
    hashes = {plan.hash, turned.hash, pickle.loads(pickle.dumps(plan)).hash}  # noqa: S301 - as Ray would
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", HASH_SCRIPT, json.dumps(config)]
        hashes.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())
    assert len(hashes) == 1

    others = [
        make_plan(source, target, bucket_bytes=8192),
        make_plan(source, vllm_layout(config, tp=1), bucket_bytes=4096),
        make_plan(source, vllm_layout(config, tp=2, dtype="bfloat16"), bucket_bytes=4096),
    ]
    assert len({plan.hash, *(other.hash for other in others)}) == 4


def turned_round(layout: Layout) -> Layout:
    """The same layout with every dict and list in the opposite order."""
    return Layout(
        "the name is for messages only",
        dict(reversed(layout.tensors.items())),
        tuple(dict(reversed(rank.items())) for rank in layout.params),
        tuple(rank[::-1] for rank in layout.shards),
        tuple(rank[::-1] for rank in layout.pads),
        layout.tied,
    )


def test_the_cached_hash_does_not_travel(make_config: Callable[..., Any]) -> None:
    """Every process hashes what it received, so that equal hashes prove equal plans."""
    config = make_config()
    plan = make_plan(megatron_layout(config, tp=1, pp=1, dp=1), vllm_layout(config, tp=1), bucket_bytes=4096)
    assert plan.hash
    assert "hash" not in pickle.loads(pickle.dumps(plan)).__dict__  # noqa: S301 - as Ray would


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
def test_wire_dtype_is_the_targets(make_config: Callable[..., Any], source: str, target: str) -> None:
    config = make_config()
    layouts = megatron_layout(config, tp=1, pp=1, dp=1, dtype=source), vllm_layout(config, tp=1, dtype=target)
    plan = make_plan(*layouts, bucket_bytes=1 << 20)
    assert {bucket.dtype for bucket in plan.buckets} == {target}
    assert plan.num_bytes == needed_bytes(layouts[1], 0)


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "float16"), ("bfloat16", "float16"), ("float16", "bfloat16"), ("float64", "float32")],
)
def test_other_losses_of_precision_are_refused(make_config: Callable[..., Any], source: str, target: str) -> None:
    config = make_config()
    layouts = megatron_layout(config, tp=1, pp=1, dp=1, dtype=source), vllm_layout(config, tp=1, dtype=target)
    with pytest.raises(
        PlanError, match=f"embed_tokens.weight: source rank 0 holds {source}, target rank 0 wants {target}"
    ):
        make_plan(*layouts, bucket_bytes=1 << 20)


def test_another_model_is_refused(make_config: Callable[..., Any]) -> None:
    source = megatron_layout(make_config(), tp=1, pp=1, dp=1)
    with pytest.raises(
        PlanError, match=r"not of one model: only the source has \[\], only the target has \['lm_head.weight'\]"
    ):
        make_plan(source, vllm_layout(make_config(tie_word_embeddings=False), tp=1), bucket_bytes=1 << 20)
    with pytest.raises(PlanError, match=r"down_proj.weight: megatron .* has shape \(16, 24\), vllm tp=1 \(16, 28\)"):
        make_plan(source, vllm_layout(make_config(intermediate_size=28), tp=1), bucket_bytes=1 << 20)


def test_what_nobody_holds_is_named() -> None:
    whole = [(tensor, Box((0,) * len(shape), shape)) for tensor, shape in SHAPES.items()]
    source = layout_of("half", [[("a", Box((0, 0), (3, 5))), *whole[1:]]])
    with pytest.raises(
        PlanError, match=r"a: target rank 0 needs Box\(start=\(3, 0\), shape=\(3, 5\)\) for param00, but no rank"
    ):
        make_plan(source, layout_of("target", [whole]), bucket_bytes=64)


def test_a_bucket_holds_at_least_one_element() -> None:
    whole = layout_of("whole", [[(tensor, Box((0,) * len(shape), shape)) for tensor, shape in SHAPES.items()]])
    with pytest.raises(PlanError, match="bucket_bytes=3 cannot hold one float32 of a"):
        make_plan(whole, whole, bucket_bytes=3)
