"""Layouts over every axis at once, against numpy slices of tensors whose elements are all different."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.families import MegatronParallel, canonical_layout, megatron_coordinates, megatron_layout, vllm_layout
from engine.layout import Layout, LayoutError

Arrays = dict[str, np.ndarray]


def moe_config(**changes: object) -> dict[str, Any]:
    """A small qwen3_moe: 4 layers, the third dense; 8 query heads, 2 key heads, 6 experts."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_hidden_layers": 4,
        "num_experts": 6,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [2],
        "vocab_size": 37,
        "tie_word_embeddings": True,
    }
    return config | changes


def numbered(config: dict[str, Any]) -> Arrays:
    """Tensors of a qwen3_moe in which every element is another integer >= 1."""
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {at + f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes |= {
            at + f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in zip("qkv", (q, kv, kv), strict=True)
        }
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q)
        if layer in config["mlp_only_layers"]:
            networks = {"mlp.": config["intermediate_size"]}
        else:
            shapes[at + "mlp.gate.weight"] = (config["num_experts"], hidden)
            networks = {f"mlp.experts.{e}.": config["moe_intermediate_size"] for e in range(config["num_experts"])}
        for name, ffn in networks.items():
            shapes |= {at + name + f"{half}_proj.weight": (ffn, hidden) for half in ("gate", "up")}
            shapes[at + name + "down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)

    ends = np.cumsum([1, *(np.prod(shape) for shape in shapes.values())])
    return {name: np.arange(*span).reshape(shapes[name]) for name, span in zip(shapes, pairwise(ends), strict=True)}


def cut_rows(array: np.ndarray, num: int, index: int) -> np.ndarray:
    """Part `index` of `num` equal parts of dim 0."""
    size = len(array) // num
    assert size * num == len(array)
    return array[index * size : (index + 1) * size]


def cut_vocabulary(array: np.ndarray, multiple: int, num: int, index: int) -> np.ndarray:
    """The same of rows padded with 0."""
    padded = np.zeros((-(-len(array) // multiple) * multiple, array.shape[1]), array.dtype)
    padded[: len(array)] = array
    return cut_rows(padded, num, index)


def megatron_rank(hf: Arrays, config: dict[str, Any], sizes: dict[str, Any], rank: int) -> Arrays:
    """One Megatron rank's parameters, by slices."""
    tp, pp, dp, cp, ep = (sizes.get(axis, 1) for axis in ("tp", "pp", "dp", "cp", "ep"))
    etp, vpp = sizes.get("etp") or tp, sizes.get("vpp") or 1
    ranks = np.arange(tp * pp * dp * cp)
    stage, _, _, t = (int(place[0]) for place in np.nonzero(ranks.reshape(pp, dp, cp, tp) == rank))
    _, _, e, et = (int(place[0]) for place in np.nonzero(ranks.reshape(pp, -1, ep, etp) == rank))
    counts = sizes.get("layers_per_stage") or [config["num_hidden_layers"] // (pp * vpp)] * (pp * vpp)
    stages = np.split(np.arange(config["num_hidden_layers"]), np.cumsum(counts)[:-1])
    params: Arrays = {}
    for chunk in range(vpp):
        prefix, position = f"{chunk}." if vpp > 1 else "", chunk * pp + stage
        if position == 0:
            embedding = hf["model.embed_tokens.weight"]
            params[prefix + "embedding.word_embeddings.weight"] = cut_vocabulary(embedding, tp, tp, t)
        if position == pp * vpp - 1:
            params[prefix + "decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            if pp > 1 or "lm_head.weight" in hf:
                head = hf.get("lm_head.weight", hf["model.embed_tokens.weight"])
                params[prefix + "output_layer.weight"] = cut_vocabulary(head, tp, tp, t)
        for local, layer in enumerate(stages[position]):
            at, to = f"model.layers.{layer}.", f"{prefix}decoder.layers.{local}."
            fused = np.concatenate(
                [
                    part
                    for group in range(config["num_key_value_heads"])
                    for part in (
                        cut_rows(hf[at + f"self_attn.{name}_proj.weight"], config["num_key_value_heads"], group)
                        for name in "qkv"
                    )
                ]
            )
            params[to + "self_attention.linear_qkv.weight"] = cut_rows(fused, tp, t)
            params[to + "self_attention.linear_proj.weight"] = cut_rows(hf[at + "self_attn.o_proj.weight"].T, tp, t).T
            for name in "qk":
                params[to + f"self_attention.{name}_layernorm.weight"] = hf[at + f"self_attn.{name}_norm.weight"]
            params[to + "input_layernorm.weight"] = hf[at + "input_layernorm.weight"]
            params[to + "pre_mlp_layernorm.weight"] = hf[at + "post_attention_layernorm.weight"]
            networks = [("mlp.", "mlp.", tp, t)]
            if layer not in config["mlp_only_layers"]:
                params[to + "mlp.router.weight"] = hf[at + "mlp.gate.weight"]
                num = config["num_experts"] // ep
                networks = [
                    (f"mlp.experts.{e * num + j}.", f"mlp.experts.local_experts.{j}.", etp, et) for j in range(num)
                ]
            for source, target, num, index in networks:
                halves = [cut_rows(hf[at + source + f"{half}_proj.weight"], num, index) for half in ("gate", "up")]
                params[to + target + "linear_fc1.weight"] = np.concatenate(halves)
                down = hf[at + source + "down_proj.weight"]
                params[to + target + "linear_fc2.weight"] = cut_rows(down.T, num, index).T
    return params


def vllm_rank(hf: Arrays, config: dict[str, Any], rank: int, *, tp: int, ep: bool) -> Arrays:
    """One vLLM rank's parameters without pipeline stages, by slices."""
    groups, experts = config["num_key_value_heads"], config["num_experts"]
    names = ("model.embed_tokens.weight", "lm_head.weight")
    params = {name: cut_vocabulary(hf[name], 64, tp, rank) for name in names if name in hf}
    params["model.norm.weight"] = hf["model.norm.weight"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        parts = [cut_rows(hf[at + "self_attn.q_proj.weight"], tp, rank)]
        for name in "kv":
            tensor = hf[at + f"self_attn.{name}_proj.weight"]
            parts.append(cut_rows(tensor, groups, rank * groups // tp) if tp > groups else cut_rows(tensor, tp, rank))
        params[at + "self_attn.qkv_proj.weight"] = np.concatenate(parts)
        params[at + "self_attn.o_proj.weight"] = cut_rows(hf[at + "self_attn.o_proj.weight"].T, tp, rank).T
        whole = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        params |= {f"{at}{name}.weight": hf[f"{at}{name}.weight"] for name in whole}

        def network(name: str, num: int, index: int, at: str = at) -> tuple[np.ndarray, np.ndarray]:
            halves = [cut_rows(hf[f"{at}{name}.{half}_proj.weight"], num, index) for half in ("gate", "up")]
            return np.concatenate(halves), cut_rows(hf[f"{at}{name}.down_proj.weight"].T, num, index).T

        if layer in config["mlp_only_layers"]:
            params[at + "mlp.gate_up_proj.weight"], params[at + "mlp.down_proj.weight"] = network("mlp", tp, rank)
            continue

        params[at + "mlp.gate.weight"] = hf[at + "mlp.gate.weight"]
        held = np.array_split(np.arange(experts), tp)[rank] if ep else range(experts)
        cut = (1, 0) if ep else (tp, rank)
        pairs = [network(f"mlp.experts.{expert}", *cut) for expert in held]
        for name, stacked in zip(("w13_weight", "w2_weight"), zip(*pairs, strict=True), strict=True):
            params[f"{at}mlp.experts.routed_experts.{name}"] = np.stack(stacked)
    return params


def assert_holds(layout: Layout, rank: int, hf: Arrays, wanted: Arrays) -> None:
    """The rank's boxes, loaded, are the wanted parameters; what belongs to no tensor is 0."""
    found = {name: np.zeros(spec.shape, int) for name, spec in layout.params[rank].items()}
    for shard in layout.shards[rank]:
        found[shard.param][shard.param_slices] = hf[shard.tensor][shard.box.slices]
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert np.array_equal(array, wanted[name]), (rank, name)


@st.composite
def megatron_worlds(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes that fit `moe_config` with any number of experts that ep divides."""
    tp, pp, cp, dp = (draw(st.sampled_from(values)) for values in ([1, 2, 4], [1, 2, 4], [1, 2], [1, 2, 3]))
    ep = draw(st.sampled_from([size for size in (1, 2, 3) if tp * cp * dp % size == 0]))
    fitting = [size for size in (1, 2, 4) if tp * cp * dp % (size * ep) == 0]
    sizes = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "ep": ep, "etp": draw(st.sampled_from(fitting)) if ep > 1 else tp}
    if pp > 1:
        sizes["vpp"] = draw(st.sampled_from([None, 2]))
        num_stages = pp * (sizes["vpp"] or 1)
        if draw(st.booleans()) or 4 % num_stages:
            cuts = sorted(draw(st.lists(st.integers(0, 4), min_size=num_stages - 1, max_size=num_stages - 1)))
            sizes["layers_per_stage"] = [high - low for low, high in pairwise([0, *cuts, 4])]
    return sizes


@given(sizes=megatron_worlds(), groups=st.sampled_from([2, 4]), tied=st.booleans())
def test_megatron_ranks_hold_their_slices(sizes: dict[str, Any], groups: int, *, tied: bool) -> None:
    config = moe_config(num_key_value_heads=groups, tie_word_embeddings=tied)
    hf = numbered(config)
    layout = megatron_layout(config, **sizes)
    layout.check_world_size(sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"])
    for rank in range(layout.num_ranks):
        assert_holds(layout, rank, hf, megatron_rank(hf, config, sizes, rank))


@given(
    tp=st.sampled_from([1, 2, 4]), num_experts=st.integers(4, 9), groups=st.sampled_from([1, 2, 8]), ep=st.booleans()
)
def test_vllm_ranks_hold_their_slices(tp: int, num_experts: int, groups: int, *, ep: bool) -> None:
    config = moe_config(num_experts=num_experts, num_key_value_heads=groups)
    hf = numbered(config)
    layout = vllm_layout(config, tp=tp, ep=ep)
    for rank in range(tp):
        assert_holds(layout, rank, hf, vllm_rank(hf, config, rank, tp=tp, ep=ep))


def test_canonical_tensors_are_those_of_the_folder() -> None:
    config = moe_config()
    assert {name: spec.shape for name, spec in canonical_layout(config).tensors.items()} == {
        name: array.shape for name, array in numbered(config).items()
    }


@given(num_layers=st.integers(1, 40), pp=st.integers(1, 8))
def test_vllm_stages_partition_the_layers_in_order(num_layers: int, pp: int) -> None:
    from engine.vllm_layout import stage_layers

    stages = [stage_layers(num_layers, pp, stage) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert len(stages[-1]) == num_layers // pp  # the last stage has the head, so it never gets a layer more


def test_vllm_stages_are_those_that_vllm_names_in_its_documentation() -> None:
    from engine.vllm_layout import stage_layers

    assert [len(stage_layers(10, 4, stage)) for stage in range(4)] == [2, 3, 3, 2]
    assert [len(stage_layers(7, 3, stage)) for stage in range(3)] == [2, 3, 2]


def holders(layout: Layout, tensor: str) -> Iterator[tuple[int, str]]:
    """Rank and parameter of every shard of a tensor."""
    for rank, shards in enumerate(layout.shards):
        yield from ((rank, shard.param) for shard in shards if shard.tensor == tensor)


@pytest.mark.parametrize(
    ("family", "tied", "expected"),
    [
        ("qwen3", True, [(0, "model.embed_tokens.weight"), (2, "model.embed_tokens.weight")]),
        ("qwen3", False, [(0, "model.embed_tokens.weight")]),
        ("qwen3_moe", True, [(rank, "model.embed_tokens.weight") for rank in range(3)]),  # vLLM builds it everywhere
    ],
)
def test_which_vllm_stages_hold_the_embedding(family: str, expected: list[tuple[int, str]], *, tied: bool) -> None:
    config = moe_config(model_type=family, tie_word_embeddings=tied)
    layout = vllm_layout(config, tp=1, pp=3)
    assert list(holders(layout, "model.embed_tokens.weight")) == expected


def test_megatrons_data_parallel_copies_share_their_objects() -> None:
    sizes = MegatronParallel(tp=2, pp=2, dp=4, cp=2, ep=2)
    layout = megatron_layout(moe_config(), sizes)
    by_content: dict[tuple[int, ...], set[int]] = {}
    for rank in range(sizes.num_ranks):
        place = sizes.coordinates(rank)
        key = (place.pipeline, place.tensor, place.expert, place.expert_tensor)
        ids = {id(part[rank]) for part in (layout.params, layout.shards, layout.pads)}
        assert by_content.setdefault(key, ids) == ids
    assert len(by_content) == len({id(rank) for rank in layout.shards}) == 8


def test_hash_does_not_depend_on_sharing() -> None:
    from dataclasses import replace

    layout = megatron_layout(moe_config(), tp=1, pp=1, dp=2)
    unshared = replace(
        layout, params=tuple(map(dict, layout.params)), shards=tuple(map(tuple, map(list, layout.shards)))
    )
    assert unshared.shards[0] is not unshared.shards[1]
    assert unshared == layout
    assert unshared.hash == layout.hash


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, {"ep": 2}, "1 ranks of a stage .tp=1 cp=1 dp=1. are no multiple of 2 .etp=1 ep=2."),
        ({}, {"tp": 2, "etp": 1}, "etp=1 with tp=2 and ep=1.*drift apart"),
        ({}, {"dp": 4, "ep": 4}, "megatron ep=4: routed experts: 6 cannot be divided evenly by 4"),
        ({}, {"dp": 32, "ep": 2, "etp": 16}, "megatron etp=16: .*gate_proj.weight rows: 8 cannot"),
        ({"model_type": "qwen3"}, {"dp": 2, "ep": 2}, "ep=2, but model_type 'qwen3' has no routed experts"),
        ({"model_type": "qwen3"}, {"tp": 2, "etp": 1}, "etp=1, but model_type 'qwen3' has no routed experts"),
        ({}, {"tp": 16, "dp": 1}, "megatron tp=16: num_attention_heads: 8 cannot be divided evenly by 16"),
        ({"num_key_value_heads": 4, "num_attention_heads": 12}, {"tp": 3}, "num_key_value_heads=4 is neither .*tp=3"),
        ({}, {"vpp": 2}, "vpp=2 virtual stages need pp > 1, got pp=1"),
        ({}, {"pp": 2, "vpp": 4}, "4 layers cannot be spread evenly over pp=2 stages of vpp=4 chunks"),
        ({}, {"pp": 2, "layers_per_stage": [1, 2]}, "layers_per_stage has 3 layers, the model 4"),
        ({}, {"pp": 2, "layers_per_stage": [4]}, r"pp=2 times vpp=1 counts >= 0, got \[4\]"),
        ({"attention_bias": True}, {}, "attention_bias=True: the layout of qwen3_moe needs absent, False"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config='fp8': block scales"),
        ({"num_experts": None}, {}, "num_experts must be an integer >= 1, got None"),
    ],
)
def test_what_megatron_cannot_do_is_named(changes: dict[str, object], sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        megatron_layout(moe_config(**changes), **sizes)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"model_type": "qwen3"}, {"tp": 2, "ep": True}, "ep=True, but model_type 'qwen3' has no routed experts"),
        ({}, {"tp": 8}, "tp=8 ranks are more than the 6 routed experts"),
        ({}, {"tp": 1, "pp": 5}, "pp=5 stages are more than num_hidden_layers=4"),
        (
            {"moe_intermediate_size": 6},
            {"tp": 4},
            "vllm tp=4: .*gate_proj.weight rows: 6 cannot be divided evenly by 4",
        ),
        ({}, {"tp": 0}, "vllm: tp must be >= 1, got 0"),
    ],
)
def test_what_vllm_cannot_do_is_named(changes: dict[str, object], sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        vllm_layout(moe_config(**changes), **sizes)


def test_a_world_of_another_size_is_refused() -> None:
    layout = megatron_layout(moe_config(), tp=2, pp=1, dp=2, ep=2)
    with pytest.raises(LayoutError, match="megatron tp=2 pp=1 dp=2 ep=2 is of 4 ranks, but the world size is 8"):
        layout.check_world_size(8)


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 3),
    dp=st.integers(1, 4),
    cp=st.integers(1, 3),
    ep=st.integers(1, 4),
    etp=st.sampled_from([None, 1, 2, 4]),
)
def test_coordinates_are_those_of_megatrons_rank_generators(
    tp: int, pp: int, dp: int, cp: int, ep: int, etp: int | None
) -> None:
    from megatron.core.parallel_state import RankGenerator

    expert_tp = tp if etp is None else etp
    if tp * cp * dp % (expert_tp * ep):
        with pytest.raises(LayoutError, match="are no multiple of"):
            MegatronParallel(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp)
        return

    parallel = MegatronParallel(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp)
    edp = tp * cp * dp // (expert_tp * ep)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=expert_tp, ep=ep, dp=edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    axes = {
        "tensor": (dense, "tp"),
        "context": (dense, "cp"),
        "data": (dense, "dp"),
        "pipeline": (dense, "pp"),
        "expert_tensor": (expert, "tp"),
        "expert": (expert, "ep"),
        "expert_data": (expert, "dp"),
    }
    for name, (generator, token) in axes.items():
        for group in generator.get_ranks(token):
            assert [getattr(parallel.coordinates(rank), name) for rank in group] == list(range(len(group)))

    with pytest.raises(LayoutError, match=rf"rank {parallel.num_ranks} is not in"):
        parallel.coordinates(parallel.num_ranks)


def test_coordinates_without_experts() -> None:
    place = megatron_coordinates(5, tp=2, pp=2, dp=2)
    assert (place.pipeline, place.data, place.tensor) == (1, 0, 1)
