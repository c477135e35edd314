"""Layouts against vLLM itself: names, shapes, dtypes and every element's coordinates after its own `load_weights`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine.conftest import RunProbe

PROBE = Path(__file__).with_name("vllm_loader_probe.py")

COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 150,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [2],
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "sliding_window": None},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 8,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
SPARSE = ("qwen3_moe", "mixtral", "deepseek_v3")


def make_case(
    family: str, *, tp: int, pp: int = 1, ep: bool = False, tied: bool = False, dtype: str = "float32"
) -> dict[str, Any]:
    """What the probe needs of one layout."""
    config = COMMON | FAMILIES[family] | {"model_type": family, "tie_word_embeddings": tied, "dtype": dtype}
    return {"config": config, "tp": tp, "pp": pp, "ep": ep, "dtype": dtype}


CASES = {
    **{f"{family} tp={tp}": make_case(family, tp=tp) for family in FAMILIES for tp in (1, 2, 4)},
    **{f"{family} tp={tp} ep": make_case(family, tp=tp, ep=True) for family in SPARSE for tp in (2, 4)},
    **{f"{family} tp=2 pp=2": make_case(family, tp=2, pp=2) for family in FAMILIES},
    **{
        f"{family} pp={pp} tied": make_case(family, tp=2, pp=pp, tied=True)
        for family in FAMILIES
        if family != "deepseek_v3"
        for pp in (1, 3)
    },
    **{f"{family} bfloat16": make_case(family, tp=2, dtype="bfloat16") for family in FAMILIES},
}


@pytest.fixture(scope="module")
def probed(run_probe: RunProbe) -> dict[str, list[str]]:
    """What differs, by case; one process for all, since importing vLLM takes most of the time."""
    return run_probe(PROBE, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_is_what_vllms_own_loaders_do(probed: dict[str, list[str]], name: str) -> None:
    assert probed[name] == []
