"""The tables: model families that the engine can lay out. A family is one entry of `FAMILIES`.

vLLM's names are those of its live parameters in 0.32 (`tests/engine/test_families_vllm.py` compares them with its
models); Megatron's are those of megatron-core 0.16.1 with local layer specs and sequential experts (a norm that
Transformer Engine fuses into a linear layer has its unfused name here).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.family_types import Count, Cut, Family, HfConfig, Layers, Place, Row

_HF, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."


def _end_row(place: Place, cut: Cut, megatron: str, tensor: str, *sizes: str) -> Row:
    """A parameter of the model's ends, which has its canonical name in vLLM."""
    return Row(place=place, cut=cut, megatron=megatron, vllm=tensor, tensors={tensor: sizes})


def _layer_row(
    cut: Cut,
    megatron: str | None,
    vllm: str | None,
    tensors: Mapping[str, tuple[str, ...]],
    *,
    layers: Layers = Layers.ALL,
    experts: bool = False,
    dtype: str | None = None,
    heads: str | None = None,
) -> Row:
    """A parameter of a layer; all names without the layer's own."""
    return Row(
        place=Place.LAYER,
        cut=cut,
        megatron=None if megatron is None else _MEGATRON + megatron,
        vllm=None if vllm is None else _HF + vllm,
        tensors={_HF + tensor: sizes for tensor, sizes in tensors.items()},
        layers=layers,
        experts=experts,
        dtype=dtype,
        heads=heads,
    )


def _norm_row(megatron: str, name: str, size: str = "hidden") -> Row:
    """A vector that every rank holds."""
    return _layer_row(Cut.REPLICATED, megatron, name, {name: (size,)})


def _mlp_rows(megatron: str, name: str, size: str, layers: Layers) -> tuple[Row, ...]:
    """A gated feed-forward network."""
    gate_up: dict[str, tuple[str, ...]] = {f"{name}.{half}_proj.weight": (size, "hidden") for half in ("gate", "up")}
    down: dict[str, tuple[str, ...]] = {f"{name}.down_proj.weight": ("hidden", size)}
    return (
        _layer_row(Cut.ROWS, f"{megatron}.linear_fc1.weight", f"{name}.gate_up_proj.weight", gate_up, layers=layers),
        _layer_row(Cut.COLUMNS, f"{megatron}.linear_fc2.weight", f"{name}.down_proj.weight", down, layers=layers),
    )


def _expert_rows(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """The router and the routed experts; `block` and the projections as the folder names them."""
    expert, megatron, vllm = (
        f"{block}.experts.{{expert}}",
        "mlp.experts.local_experts.{expert}",
        f"{block}.experts.routed_experts",
    )
    gate_up = {f"{expert}.{half}.weight": ("expert_ffn", "hidden") for half in (gate, up)}
    down_tensors = {f"{expert}.{down}.weight": ("hidden", "expert_ffn")}
    fc1, fc2 = f"{megatron}.linear_fc1.weight", f"{megatron}.linear_fc2.weight"
    router, sparse = f"{block}.gate.weight", Layers.SPARSE
    return (
        _layer_row(Cut.REPLICATED, "mlp.router.weight", router, {router: ("experts", "hidden")}, layers=sparse),
        _layer_row(Cut.ROWS, fc1, f"{vllm}.w13_weight", gate_up, layers=sparse, experts=True),
        _layer_row(Cut.COLUMNS, fc2, f"{vllm}.w2_weight", down_tensors, layers=sparse, experts=True),
    )


_END_ROWS = (
    _end_row(
        Place.FIRST,
        Cut.VOCABULARY,
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        "vocabulary",
        "hidden",
    ),
    _end_row(Place.LAST, Cut.REPLICATED, "decoder.final_layernorm.weight", "model.norm.weight", "hidden"),
    _end_row(Place.LAST, Cut.VOCABULARY, "output_layer.weight", "lm_head.weight", "vocabulary", "hidden"),
)

_NORM_ROWS = (
    _norm_row("input_layernorm.weight", "input_layernorm.weight"),
    _norm_row("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)

_ATTENTION_ROWS = (
    _layer_row(
        Cut.QKV,
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        {
            "self_attn.q_proj.weight": ("q", "hidden"),
            "self_attn.k_proj.weight": ("kv", "hidden"),
            "self_attn.v_proj.weight": ("kv", "hidden"),
        },
    ),
    _layer_row(
        Cut.COLUMNS,
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        {"self_attn.o_proj.weight": ("hidden", "q")},
    ),
)

_QKV_BIAS_ROW = _layer_row(
    Cut.QKV,
    "self_attention.linear_qkv.bias",
    "self_attn.qkv_proj.bias",
    {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
)

_QK_NORM_ROWS = (
    _norm_row("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head"),
    _norm_row("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head"),
)

_DENSE_ROWS = (*_END_ROWS, *_NORM_ROWS, *_ATTENTION_ROWS, *_mlp_rows("mlp", "mlp", "ffn", Layers.DENSE))

# Multi-head latent attention. Megatron keeps the two down-projections apart and, with Transformer Engine, whole on
# every tensor rank; its local layer spec would cut them.
_Q_DOWN, _KV_DOWN = "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"
_Q_UP, _KV_UP, _OUT = "self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"
_LATENT_ROWS = (
    _layer_row(Cut.REPLICATED, "self_attention.linear_q_down_proj.weight", None, {_Q_DOWN: ("q_latent", "hidden")}),
    _layer_row(Cut.REPLICATED, "self_attention.linear_kv_down_proj.weight", None, {_KV_DOWN: ("kv_down", "hidden")}),
    _layer_row(
        Cut.REPLICATED,
        None,
        "self_attn.fused_qkv_a_proj.weight",
        {_Q_DOWN: ("q_latent", "hidden"), _KV_DOWN: ("kv_down", "hidden")},
    ),
    _norm_row("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", "q_latent"),
    _norm_row("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", "kv_latent"),
    _layer_row(
        Cut.ROWS, "self_attention.linear_q_up_proj.weight", _Q_UP, {_Q_UP: ("q_up", "q_latent")}, heads="q_head"
    ),
    _layer_row(
        Cut.ROWS, "self_attention.linear_kv_up_proj.weight", _KV_UP, {_KV_UP: ("kv_up", "kv_latent")}, heads="kv_head"
    ),
    _layer_row(Cut.COLUMNS, "self_attention.linear_proj.weight", _OUT, {_OUT: ("hidden", "out")}, heads="v_head"),
)

_ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
_ROUTER_BIAS_ROW = _layer_row(
    Cut.REPLICATED,
    "mlp.router.expert_bias",
    _ROUTER_BIAS,
    {_ROUTER_BIAS: ("experts",)},
    layers=Layers.SPARSE,
    dtype="float32",
)


def _dense_sizes(count: Count) -> dict[str, int]:
    heads, hidden = count("num_attention_heads"), count("hidden_size")
    head = count("head_dim", hidden // heads)
    return {
        "vocabulary": count("vocab_size"),
        "hidden": hidden,
        "ffn": count("intermediate_size"),
        "head": head,
        "q": heads * head,
        "kv": count("num_key_value_heads", heads) * head,
    }


def _qwen3_moe_sizes(count: Count) -> dict[str, int]:
    return _dense_sizes(count) | {"experts": count("num_experts"), "expert_ffn": count("moe_intermediate_size")}


def _mixtral_sizes(count: Count) -> dict[str, int]:
    return _dense_sizes(count) | {"experts": count("num_local_experts"), "expert_ffn": count("intermediate_size")}


def _deepseek_sizes(count: Count) -> dict[str, int]:
    heads, rope, value = count("num_attention_heads"), count("qk_rope_head_dim"), count("v_head_dim")
    q_head, kv_head = count("qk_nope_head_dim") + rope, count("qk_nope_head_dim") + value
    expert_ffn = count("moe_intermediate_size")
    return {
        "vocabulary": count("vocab_size"),
        "hidden": count("hidden_size"),
        "ffn": count("intermediate_size"),
        "q_latent": count("q_lora_rank"),
        "kv_latent": count("kv_lora_rank"),
        "kv_down": count("kv_lora_rank") + rope,
        "q_head": q_head,
        "kv_head": kv_head,
        "v_head": value,
        "q_up": heads * q_head,
        "kv_up": heads * kv_head,
        "out": heads * value,
        "experts": count("n_routed_experts"),
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * count("n_shared_experts"),
    }


def _qwen3_moe_is_sparse(config: HfConfig, layer: int) -> bool:
    dense = config.get("mlp_only_layers") or ()
    return layer not in dense and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _deepseek_is_sparse(config: HfConfig, layer: int) -> bool:
    return layer >= (config.get("first_k_dense_replace") or 0) and layer % (config.get("moe_layer_freq") or 1) == 0


_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_NO_BIAS = {"attention_bias": (None, False), "mlp_bias": (None, False)}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2": Family(rows=(*_DENSE_ROWS, _QKV_BIAS_ROW), sizes=_dense_sizes, tied=_TIED),
        "llama": Family(rows=_DENSE_ROWS, sizes=_dense_sizes, tied=_TIED, only=_NO_BIAS),
        "qwen3": Family(rows=(*_DENSE_ROWS, *_QK_NORM_ROWS), sizes=_dense_sizes, tied=_TIED, only=_NO_BIAS),
        "qwen3_moe": Family(
            rows=(*_DENSE_ROWS, *_QK_NORM_ROWS, *_expert_rows("mlp", "gate_proj", "up_proj", "down_proj")),
            sizes=_qwen3_moe_sizes,
            is_sparse=_qwen3_moe_is_sparse,
            tied=_TIED,
            only=_NO_BIAS | {"shared_expert_intermediate_size": (None, 0)},
            vllm_ends_everywhere=True,
        ),
        "mixtral": Family(
            rows=(*_END_ROWS, *_NORM_ROWS, *_ATTENTION_ROWS, *_expert_rows("block_sparse_moe", "w1", "w3", "w2")),
            sizes=_mixtral_sizes,
            is_sparse=lambda _config, _layer: True,
            tied=_TIED,
            vllm_ends_everywhere=True,
        ),
        # Without the layers for multi-token prediction (num_nextn_predict_layers), which vLLM leaves out as well.
        "deepseek_v3": Family(
            rows=(
                *_END_ROWS,
                *_NORM_ROWS,
                *_LATENT_ROWS,
                *_mlp_rows("mlp", "mlp", "ffn", Layers.DENSE),
                *_mlp_rows("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", Layers.SPARSE),
                *_expert_rows("mlp", "gate_proj", "up_proj", "down_proj"),
                _ROUTER_BIAS_ROW,
            ),
            sizes=_deepseek_sizes,
            is_sparse=_deepseek_is_sparse,
            only=_NO_BIAS | {"tie_word_embeddings": (None, False), "topk_method": ("noaux_tc",)},
            verified=False,
        ),
    }
)
"""`model_type` of config.json -> its table."""
