"""From a Hugging Face folder to a Megatron `GPTModel`: its config, its layers, its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.families import HfConfig
from engine.layout import Layout
from trainers.fused_cpu import SwiGlu
from trainers.packing import PackedAttention, group_sequences

# With Transformer Engine a norm is part of the linear layer behind it; layouts know it under its own name.
_FUSED_NORMS = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a layout's name for it, "bfloat16" for instance."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def transformer_config(hf_config: HfConfig, *, tp: int, pp: int, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Return Megatron's `TransformerConfig` for a dense Qwen2 model.

    `calculate_per_token_loss` makes Megatron sum gradients over data-parallel ranks instead of averaging them, and
    `variable_seq_lengths` lets packed micro-batches of any length through the pipeline. `perform_initialization` stays
    on although the weights are loaded: without it Megatron-Core 0.16.1 does not mark which parameters are cut over
    tensor ranks, and the gradient norm is silently wrong.

    Raises:
        ValueError: the config asks for something that this model does not do.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    _check_supported(hf_config)
    heads, on_gpu = hf_config["num_attention_heads"], torch.cuda.is_available()
    return TransformerConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=hf_config.get("num_key_value_heads") or heads,
        kv_channels=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        layernorm_epsilon=hf_config["rms_norm_eps"],
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        deterministic_mode=on_gpu,  # a CPU's kernels are deterministic as they are
        moe_token_dispatcher_type="alltoall",  # there are no experts, but variable lengths refuse the default
        apply_rope_fusion=True,
        bias_activation_fusion=on_gpu,
        use_te_activation_func=not on_gpu,  # "the activation is the layer spec's": SwiGlu
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=False,  # not on the packed path
        gradient_accumulation_fusion=False,  # needs Apex
        persist_layer_norm=on_gpu,
    )


def _check_supported(hf_config: HfConfig) -> None:
    wanted: dict[str, tuple[object, object]] = {
        "model_type": (hf_config.get("model_type"), "qwen2"),
        "hidden_act": (hf_config.get("hidden_act", "silu"), "silu"),
        "use_sliding_window": (bool(hf_config.get("use_sliding_window", False)), False),
        "rope type": (_rope_type(hf_config), "default"),
    }
    for key, (found, supported) in wanted.items():
        if found != supported:
            raise ValueError(f"the Megatron trainer supports {key} {supported!r}, but config.json has {found!r}")


def _rope_type(hf_config: HfConfig) -> object:
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope_theta(hf_config: HfConfig) -> float:
    """transformers 5 nests it, 4 does not."""
    rope = hf_config.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0)


def build_model(hf_config: HfConfig, config: Any) -> Any:  # noqa: ANN401
    """Return this rank's part of the `GPTModel`, weights not loaded. megatron's parallel state must be initialized.

    Args:
        hf_config: parsed config.json.
        config: from `transformer_config`.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    tp = config.tensor_model_parallel_size
    model = GPTModel(
        config,
        layer_spec(),
        vocab_size=-(-hf_config["vocab_size"] // tp) * tp,
        max_sequence_length=hf_config["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=_rope_theta(hf_config),
    )
    return model.to(device=torch.cuda.current_device(), dtype=config.params_dtype)


def layer_spec() -> Any:  # noqa: ANN401
    """Return one layer's `ModuleSpec`: Transformer Engine's on a GPU, the local one with our attention on a CPU."""
    from megatron.core.models.gpt import gpt_layer_specs

    if torch.cuda.is_available():
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()

    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    spec.submodules.mlp.submodules.activation_func = SwiGlu
    return spec


def packed_sequences(lengths: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Return Megatron's `PackedSeqParams` for sequences of these lengths, packed one after the other."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ends = ends.to(torch.cuda.current_device())
    longest = max(lengths)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    if not torch.cuda.is_available():
        params.groups = group_sequences(lengths)  # for PackedAttention: once a micro-batch, not once a layer
    return params


def layout_parameters(model: Any) -> dict[str, torch.nn.Parameter]:  # noqa: ANN401
    """Return the model's parameters under the names that a Megatron layout gives them."""
    parameters: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        for fused, own in _FUSED_NORMS:
            name = name.replace(fused, own)
        parameters[name] = parameter
    return parameters


def check_parameters(parameters: Mapping[str, Tensor], layout: Layout, rank: int) -> None:
    """Assert that a rank's parameters are those of the layout, by name and shape."""
    found = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    wanted = {name: spec.shape for name, spec in layout.params[rank].items()}
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    assert not differing, [(name, found.get(name), wanted.get(name)) for name in differing[:5]]


def load_weights(parameters: Mapping[str, Tensor], layout: Layout, rank: int, folder: Path) -> None:
    """Fill a rank's parameters from the folder's safetensors. Only the rank's own boxes are read; padding becomes 0.

    Args:
        parameters: by layout name, changed in place (cast to their own dtype).
        layout: from `megatron_layout`.
        rank: which rank of the layout this is.
        folder: with one or more `*.safetensors`.

    Raises:
        ValueError: the folder lacks a tensor, or has it in another shape.
    """
    from safetensors import safe_open

    check_parameters(parameters, layout, rank)
    wanted = {shard.tensor for shard in layout.shards[rank]}
    with torch.no_grad():
        for pad in layout.pads[rank]:
            parameters[pad.param][pad.box.slices].zero_()

        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                here = wanted.intersection(file.keys())
                for shard in layout.shards[rank]:
                    if shard.tensor in here:
                        source = file.get_slice(shard.tensor)
                        _check_shape(shard.tensor, tuple(source.get_shape()), layout, path)
                        parameters[shard.param][shard.param_slices].copy_(source[shard.box.slices])
                wanted -= here

    if wanted:
        raise ValueError(f"{folder} has no tensor {', '.join(sorted(wanted)[:5])} in its *.safetensors")


def _check_shape(tensor: str, found: tuple[int, ...], layout: Layout, path: Path) -> None:
    expected = layout.tensors[tensor].shape
    if found != expected:
        raise ValueError(f"{path}: {tensor} has shape {found}, but config.json says {expected}")
