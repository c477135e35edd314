"""The tables against gather-then-slice references, against names written out by hand, and against vLLM itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.families import canonical_layout, megatron_coordinates, megatron_layout, vllm_layout
from engine.layout import Layout, LayoutError, TensorSpec


def loaded(layout: Layout, hf: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What every rank holds if it loads its boxes; padding 0."""
    ranks = []
    for specs, shards in zip(layout.params, layout.shards, strict=True):
        params = {name: torch.zeros(spec.shape) for name, spec in specs.items()}
        for shard in shards:
            params[shard.param][shard.param_slices] = hf[shard.tensor][shard.box.slices]
        ranks.append(params)
    return ranks


def assert_equal(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    """Compare ranks parameter by parameter, bitwise."""
    for rank, (params, reference) in enumerate(zip(found, wanted, strict=True)):
        assert params.keys() == reference.keys()
        for name, tensor in params.items():
            assert torch.equal(tensor, reference[name]), f"rank {rank}: {name}"


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes that tensor-parallel sizes up to 4 divide, with any vocabulary."""
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = draw(st.sampled_from([size for size in (4, 8) if size % groups == 0]))
    return {
        "hidden_size": 8 * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([2, 4])),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": 4 * draw(st.integers(1, 5)),
        "num_hidden_layers": draw(st.sampled_from([2, 4])),
        "vocab_size": draw(st.integers(1, 200)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@given(sizes=models(), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2]), dp=st.sampled_from([1, 2]))
def test_megatron_ranks_hold_what_gather_then_slice_gives(
    make_config: Callable[..., Any], references: Callable[..., Any], sizes: dict[str, Any], tp: int, pp: int, dp: int
) -> None:
    config = make_config(**sizes)
    if (sizes["num_attention_heads"] + 2 * sizes["num_key_value_heads"]) * sizes["head_dim"] % tp:
        with pytest.raises(LayoutError, match="cannot be divided evenly"):
            megatron_layout(config, tp=tp, pp=pp, dp=dp)
        return

    reference = references(config, 0)
    assert_equal(
        loaded(megatron_layout(config, tp=tp, pp=pp, dp=dp), reference.hf), reference.megatron(tp=tp, pp=pp, dp=dp)
    )


@given(sizes=models(), tp=st.sampled_from([1, 2, 4]))
def test_vllm_ranks_hold_what_gather_then_slice_gives(
    make_config: Callable[..., Any], references: Callable[..., Any], sizes: dict[str, Any], tp: int
) -> None:
    config = make_config(**sizes)
    reference = references(config, 0)
    assert_equal(loaded(vllm_layout(config, tp=tp), reference.hf), reference.vllm(tp=tp))


def test_canonical_layout_is_the_folder_itself(make_config: Callable[..., Any], references: Callable[..., Any]) -> None:
    config = make_config(tie_word_embeddings=False)
    reference = references(config, 0)
    layout = canonical_layout(config)
    assert_equal(loaded(layout, reference.hf), [reference.hf])
    assert layout.tensors == layout.params[0]
    assert layout.tied == {}


def test_names_of_one_layer(make_config: Callable[..., Any]) -> None:
    config = make_config(num_hidden_layers=2, vocab_size=37)
    assert sorted(megatron_layout(config, tp=1, pp=2, dp=1).params[1]) == [
        "decoder.final_layernorm.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "output_layer.weight",
    ]
    assert sorted(name for name in vllm_layout(config, tp=1).params[0] if "layers.0" not in name) == [
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.gate_up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.self_attn.qkv_proj.bias",
        "model.layers.1.self_attn.qkv_proj.weight",
        "model.norm.weight",
    ]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_who_holds_the_output_layer(make_config: Callable[..., Any], pp: int, *, tied: bool) -> None:
    config = make_config(tie_word_embeddings=tied)
    layout = megatron_layout(config, tp=1, pp=pp, dp=1)
    tensor = "model.embed_tokens.weight" if tied else "lm_head.weight"
    held = [shard.tensor for shard in layout.shards[-1] if shard.param == "output_layer.weight"]
    assert held == ([] if tied and pp == 1 else [tensor])
    assert ("lm_head.weight" in layout.tensors) is not tied
    assert layout.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert ("lm_head.weight" in vllm_layout(config, tp=1).params[0]) is not tied


def test_vocabulary_is_padded_by_each_side_in_its_own_way(make_config: Callable[..., Any]) -> None:
    config = make_config(vocab_size=37, hidden_size=16)
    megatron, vllm = megatron_layout(config, tp=2, pp=1, dp=1), vllm_layout(config, tp=2)
    assert megatron.params[1]["embedding.word_embeddings.weight"] == TensorSpec((19, 16), "float32")
    assert [pad.box.shape for pad in megatron.pads[1]] == [(1, 16)]
    assert vllm.params[1]["model.embed_tokens.weight"] == TensorSpec((32, 16), "float32")
    assert [pad.box.shape for pad in vllm.pads[1]] == [(27, 16)]
    assert not megatron.pads[0]
    assert not vllm.pads[0]


def test_rank_order_is_tensor_data_pipeline() -> None:
    places = [megatron_coordinates(rank, tp=2, pp=2, dp=2) for rank in range(8)]
    assert [(place.pipeline, place.data, place.tensor) for place in places] == [
        (pipeline, data, tensor) for pipeline in (0, 1) for data in (0, 1) for tensor in (0, 1)
    ]
    with pytest.raises(LayoutError, match=r"rank 8 is not in \[0, 8\)"):
        megatron_coordinates(8, tp=2, pp=2, dp=2)


def test_dtype_is_the_configs_unless_given(make_config: Callable[..., Any]) -> None:
    found = [
        megatron_layout(make_config(**changes), tp=1, pp=1, dp=1, dtype=dtype)
        .params[0]["decoder.final_layernorm.weight"]
        .dtype
        for changes, dtype in [
            ({}, None),
            ({"dtype": "bfloat16"}, None),
            ({"torch_dtype": "float16"}, None),
            ({}, "bfloat16"),
        ]
    ]
    assert found == ["float32", "bfloat16", "float16", "bfloat16"]


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"model_type": "gpt2"}, {}, "no weight layout for model_type 'gpt2'; known are .*llama.*qwen2"),
        ({"num_hidden_layers": 3}, {"pp": 2}, "3 layers cannot be spread evenly over pp=2"),
        ({"intermediate_size": 25}, {"tp": 2}, "gate_proj.weight rows: 25 cannot be divided evenly by 2"),
        ({"num_attention_heads": 3}, {}, "num_attention_heads=3 is no multiple of num_key_value_heads=2"),
        ({"hidden_size": None}, {}, "hidden_size must be an integer >= 1, got None"),
        ({}, {"dp": 0}, "dp must be >= 1, got 0"),
    ],
)
def test_what_megatron_cannot_do_is_named(
    make_config: Callable[..., Any], changes: dict[str, object], sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        megatron_layout(make_config(**changes), **({"tp": 1, "pp": 1, "dp": 1} | sizes))


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        (
            {"num_attention_heads": 4, "num_key_value_heads": 4},
            8,
            "q_proj.weight heads: 4 cannot be divided evenly by 8",
        ),
        ({"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 2}, 2, "k_proj.weight heads: 3 cannot"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 150},
            3,
            "vllm tp=3 over the heads of .*: 3 cannot",
        ),
    ],
)
def test_what_vllm_cannot_do_is_named(
    make_config: Callable[..., Any], changes: dict[str, int], tp: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        vllm_layout(make_config(intermediate_size=48, **changes), tp=tp)


VLLM_RANK = """
import json, os, sys
folder, rank, tp, port = sys.argv[1], *map(int, sys.argv[2:])
os.environ["VLLM_DIST_IDENT"] = f"rank-{rank}"  # differs between the ranks: they then share no memory
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from engine.families import vllm_layout

executor = "mp" if tp > 1 else "uni"
args = EngineArgs(model=folder, dtype="float32", max_model_len=64, enforce_eager=True, skip_tokenizer_init=True,
                  tensor_parallel_size=tp, distributed_executor_backend=executor)
config = args.create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(tp, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
    initialize_model_parallel(tp)
    model = initialize_model(config)
    hf = load_file(folder + "/model.safetensors")
    model.load_weights(hf.items())

layout = vllm_layout(json.load(open(folder + "/config.json")), tp=tp)
wanted = {name: torch.zeros(spec.shape) for name, spec in layout.params[rank].items()}
for shard in layout.shards[rank]:
    wanted[shard.param][shard.param_slices] = hf[shard.tensor][shard.box.slices]
found = {name: param.detach() for name, param in model.named_parameters()}
differing = [name for name in found | wanted
             if name not in found or name not in wanted or not torch.equal(found[name], wanted[name])]
print("differing", differing, "compared", len(found), flush=True)
os._exit(0 if not differing else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "groups", "tied"), [(1, 2, False), (2, 1, True)])
def test_vllm_layout_is_what_vllms_own_loaders_do(
    make_config: Callable[..., Any], references: Callable[..., Any], tmp_path: Path, tp: int, groups: int, *, tied: bool
) -> None:
    """Unpacked parameters of vLLM's model after its own `load_weights`, all ranks, names, shapes and bits."""
    from safetensors.torch import save_file

    config = make_config(
        hidden_size=64,
        num_key_value_heads=groups,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
        max_position_embeddings=64,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        dtype="float32",
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(references(config, 0).hf, tmp_path / "model.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = os.environ | quiet | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", VLLM_RANK, str(tmp_path), str(rank), str(tp), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tp)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * tp, "\n".join(outputs)
