"""The tables of `families.py`: which canonical tensors a parameter is made of, its name on both sides, how it is cut.

A family is one table. Nothing else in the engine asks for a family's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Cut(StrEnum):
    """How a parameter is spread over tensor-parallel ranks."""

    REPLICATED = "replicated"  # every rank holds it whole
    COLUMNS = "columns"  # equal parts of dim 1 (Megatron's row-parallel linear: the input dim)
    VOCABULARY = "vocabulary"  # equal parts of dim 0, after padding it to a multiple that the side chooses
    GATE_UP = "gate_up"  # each tensor in equal parts of dim 0, a rank's parts concatenated
    QKV = "qkv"  # whole heads of dim 0; the order differs between the sides


class Place(StrEnum):
    """Which pipeline stages hold a parameter."""

    FIRST = "first"
    LAYER = "layer"  # the stage of its layer; names contain `{layer}`
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One parameter of a family.

    Attributes:
        place, cut: see the enums.
        megatron, vllm: parameter names. `{layer}` is local to the pipeline stage in Megatron and global in vLLM.
        tensors: canonical name -> the sizes of its dims by name, in fused order (q, k, v; gate, up).
    """

    place: Place
    cut: Cut
    megatron: str
    vllm: str
    tensors: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: its rows, and the alias that `tie_word_embeddings` makes."""

    rows: tuple[Row, ...]
    tied: Mapping[str, str]


_HF, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."

_DENSE_ROWS = (
    Row(
        place=Place.FIRST,
        cut=Cut.VOCABULARY,
        megatron="embedding.word_embeddings.weight",
        vllm="model.embed_tokens.weight",
        tensors={"model.embed_tokens.weight": ("vocabulary", "hidden")},
    ),
    Row(
        place=Place.LAYER,
        cut=Cut.REPLICATED,
        megatron=_MEGATRON + "input_layernorm.weight",
        vllm=_HF + "input_layernorm.weight",
        tensors={_HF + "input_layernorm.weight": ("hidden",)},
    ),
    Row(
        place=Place.LAYER,
        cut=Cut.QKV,
        megatron=_MEGATRON + "self_attention.linear_qkv.weight",
        vllm=_HF + "self_attn.qkv_proj.weight",
        tensors={
            _HF + "self_attn.q_proj.weight": ("q", "hidden"),
            _HF + "self_attn.k_proj.weight": ("kv", "hidden"),
            _HF + "self_attn.v_proj.weight": ("kv", "hidden"),
        },
    ),
    Row(
        place=Place.LAYER,
        cut=Cut.COLUMNS,
        megatron=_MEGATRON + "self_attention.linear_proj.weight",
        vllm=_HF + "self_attn.o_proj.weight",
        tensors={_HF + "self_attn.o_proj.weight": ("hidden", "q")},
    ),
    Row(
        place=Place.LAYER,
        cut=Cut.REPLICATED,
        megatron=_MEGATRON + "pre_mlp_layernorm.weight",
        vllm=_HF + "post_attention_layernorm.weight",
        tensors={_HF + "post_attention_layernorm.weight": ("hidden",)},
    ),
    Row(
        place=Place.LAYER,
        cut=Cut.GATE_UP,
        megatron=_MEGATRON + "mlp.linear_fc1.weight",
        vllm=_HF + "mlp.gate_up_proj.weight",
        tensors={_HF + "mlp.gate_proj.weight": ("ffn", "hidden"), _HF + "mlp.up_proj.weight": ("ffn", "hidden")},
    ),
    Row(
        place=Place.LAYER,
        cut=Cut.COLUMNS,
        megatron=_MEGATRON + "mlp.linear_fc2.weight",
        vllm=_HF + "mlp.down_proj.weight",
        tensors={_HF + "mlp.down_proj.weight": ("hidden", "ffn")},
    ),
    Row(
        place=Place.LAST,
        cut=Cut.REPLICATED,
        megatron="decoder.final_layernorm.weight",
        vllm="model.norm.weight",
        tensors={"model.norm.weight": ("hidden",)},
    ),
    Row(
        place=Place.LAST,
        cut=Cut.VOCABULARY,
        megatron="output_layer.weight",
        vllm="lm_head.weight",
        tensors={"lm_head.weight": ("vocabulary", "hidden")},
    ),
)

_QKV_BIAS_ROW = Row(
    place=Place.LAYER,
    cut=Cut.QKV,
    megatron=_MEGATRON + "self_attention.linear_qkv.bias",
    vllm=_HF + "self_attn.qkv_proj.bias",
    tensors={
        _HF + "self_attn.q_proj.bias": ("q",),
        _HF + "self_attn.k_proj.bias": ("kv",),
        _HF + "self_attn.v_proj.bias": ("kv",),
    },
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2": Family(rows=(*_DENSE_ROWS, _QKV_BIAS_ROW), tied={"lm_head.weight": "model.embed_tokens.weight"}),
    }
)
"""`model_type` of config.json -> its table."""
