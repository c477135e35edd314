"""The layout of DeepSeek-V3: latent attention, a router bias that stays float32, and a size that has to be bearable."""

from __future__ import annotations

from typing import Any

import pytest

from engine.families import megatron_layout, vllm_layout
from engine.layout import LayoutError


def deepseek_config(**changes: object) -> dict[str, Any]:
    """DeepSeek-V3's own numbers."""
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "topk_method": "noaux_tc",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return config | changes


def test_a_router_bias_keeps_float32_whatever_the_models_dtype() -> None:
    config = deepseek_config(num_hidden_layers=4, n_routed_experts=4)
    tensor = "model.layers.3.mlp.gate.e_score_correction_bias"
    megatron = megatron_layout(config, tp=1, pp=1, dp=1)
    assert megatron.tensors[tensor].dtype == "float32"
    assert megatron.params[0]["decoder.layers.3.mlp.router.expert_bias"].dtype == "float32"
    assert megatron.params[0]["decoder.layers.3.mlp.router.weight"].dtype == "bfloat16"
    assert vllm_layout(config, tp=1).params[0][tensor].dtype == "float32"
    assert not megatron.verified


def test_latent_attention_of_deepseek_v3() -> None:
    config = deepseek_config(num_hidden_layers=4, n_routed_experts=4)
    at = "model.layers.0.self_attn."
    vllm = vllm_layout(config, tp=4)
    fused = [shard for shard in vllm.shards[3] if shard.param == at + "fused_qkv_a_proj.weight"]
    assert [(shard.tensor, shard.box.start, shard.box.shape, shard.param_start) for shard in fused] == [
        (at + "kv_a_proj_with_mqa.weight", (0, 0), (512 + 64, 7168), (1536, 0)),
        (at + "q_a_proj.weight", (0, 0), (1536, 7168), (0, 0)),
    ]
    (up,) = (shard for shard in vllm.shards[3] if shard.param == at + "q_b_proj.weight")
    assert (up.box.start, up.box.shape) == ((96 * 192, 0), (32 * 192, 1536))
    megatron = megatron_layout(config, tp=4, pp=1, dp=1)
    (down,) = (shard for shard in megatron.shards[3] if shard.tensor == at + "q_a_proj.weight")
    assert down.param == "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    with pytest.raises(LayoutError, match=r"tp=256: .*q_b_proj.weight heads: 128 cannot be divided evenly by 256"):
        vllm_layout(deepseek_config(), tp=256)


def test_512_and_512_ranks_of_deepseek_v3_are_few_objects() -> None:
    counts = [4] * 14 + [3, 2]
    source = megatron_layout(deepseek_config(), tp=8, pp=16, dp=4, ep=32, etp=1, layers_per_stage=counts)
    target = vllm_layout(deepseek_config(), tp=32, pp=16, ep=True)
    assert source.num_ranks == target.num_ranks == 512
    assert sum(spec.num_elements for spec in source.tensors.values()) == 671_026_419_200  # without the 11.5 B of MTP
    for layout in (source, target):  # every expert is held once, not once a rank
        assert sum(".experts." in shard.tensor for shards in layout.shards for shard in shards) == 58 * 256 * 3
