"""What every rank of Megatron, of vLLM and of a Hugging Face folder holds, from the family's table and a config.json.

The door to the layouts: the tables are in `family_tables.py`, each side's rules in `megatron_layout.py` and
`vllm_layout.py`. A new family is a new table, not a new branch.
"""

from __future__ import annotations

from engine.family_types import HfConfig
from engine.layout import Layout, Shard
from engine.megatron_layout import MegatronCoordinates, MegatronParallel, megatron_coordinates, megatron_layout
from engine.model_shape import read_model
from engine.param_cuts import RankContent, make_box, make_layout
from engine.vllm_layout import vllm_layout

__all__ = [
    "HfConfig",
    "MegatronCoordinates",
    "MegatronParallel",
    "canonical_layout",
    "megatron_coordinates",
    "megatron_layout",
    "vllm_layout",
]


def canonical_layout(hf_config: HfConfig, *, dtype: str | None = None) -> Layout:
    """Return the layout of a Hugging Face folder: one rank that holds every tensor whole, under its own name.

    Args:
        hf_config: parsed config.json of a family in `FAMILIES`.
        dtype: of every tensor; None takes the config's. A router's bias is float32 in any case.

    Raises:
        LayoutError: an unknown family.
    """
    model = read_model(hf_config, dtype)
    shards = tuple(
        Shard(name, make_box((0,) * len(spec.shape), spec.shape), name, (0,) * len(spec.shape))
        for name, spec in model.tensors.items()
    )
    return make_layout("canonical", model, [RankContent(model.tensors, shards, ())])
