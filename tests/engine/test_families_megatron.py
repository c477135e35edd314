"""Layouts against Megatron itself: its ranks' coordinates, and names, shapes and numbers in the models it builds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine.conftest import RunProbe

PROBE = Path(__file__).with_name("megatron_model_probe.py")

COMMON = {
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 150,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [2],
    },
    "mixtral": {"num_local_experts": 4},
}
SPARSE = {"qwen3_moe": [1, 1, 0, 1], "mixtral": [1, 1, 1, 1]}


def make_case(family: str, parallel: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """What the probe needs of one layout."""
    config = COMMON | FAMILIES[family] | {"model_type": family}
    return {"config": config, "parallel": parallel, "dtype": dtype, "sparse": SPARSE.get(family)}


DENSE_WORLDS: tuple[dict[str, Any], ...] = (
    {"tp": 4, "dp": 2},
    {"tp": 2, "pp": 2, "cp": 2, "dp": 2},
    {"pp": 2, "vpp": 2},
    {"tp": 2, "pp": 2, "layers_per_stage": [3, 1], "vocabulary_divisor": 32},
    {"pp": 2, "vpp": 2, "layers_per_stage": [1, 2, 0, 1]},
)
EXPERT_WORLDS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "dp": 2},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "dp": 4, "ep": 4},
    {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 1},
    {"dp": 4, "ep": 2, "etp": 2, "pp": 2, "vpp": 2},
)
CASES = {
    **{
        f"{family} {parallel}": make_case(family, parallel)
        for family in ("qwen2", "llama", "qwen3")
        for parallel in DENSE_WORLDS
    },
    **{
        f"{family} {parallel}": make_case(family, parallel)
        for family in ("qwen3_moe", "mixtral")
        for parallel in EXPERT_WORLDS
    },
    "qwen3_moe bfloat16": make_case("qwen3_moe", {"tp": 2, "dp": 2, "ep": 2}, "bfloat16"),
}


@pytest.fixture(scope="module")
def probed(run_probe: RunProbe) -> dict[str, list[str]]:
    """What differs, by case; one process for all, apart because of the patches for the CPU."""
    return run_probe(PROBE, CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layout_is_what_megatron_builds(probed: dict[str, list[str]], name: str) -> None:
    assert probed[name] == []
