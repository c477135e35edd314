"""Every rank of Megatron's own models against the layout. Run as a process of its own.

    python megatron_model_probe.py cases.json results.json

torch's "fake" process groups let one process be each rank of a world in turn: Megatron builds its groups and a rank's
model chunks with its own code; nothing is ever communicated. Compared are the rank's coordinates in both grids, names,
shapes and dtypes of parameters, and the global numbers of layers and experts. No MLA: Megatron's needs Transformer
Engine.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch


class NoAttention(torch.nn.Module):
    """In the place of the core attention, which has no weights; Megatron's local one refuses context axes."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


def transformer_config(case: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return Megatron's config of a case."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    hf, sizes, dtype = case["config"], case["parallel"], getattr(torch, case["dtype"])
    heads = hf["num_attention_heads"]
    fields: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf["model_type"] == "qwen2",
        "qk_layernorm": hf["model_type"] in ("qwen3", "qwen3_moe"),
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "virtual_pipeline_model_parallel_size": sizes.get("vpp"),
        "context_parallel_size": sizes.get("cp", 1),
        "expert_model_parallel_size": sizes.get("ep", 1),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": case["dtype"] == "bfloat16",
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    if sizes.get("etp") is not None:
        fields["expert_tensor_parallel_size"] = sizes["etp"]

    if sizes.get("layers_per_stage") is not None:
        stages = [["decoder"] * size for size in sizes["layers_per_stage"]]
        fields["pipeline_model_parallel_layout"] = [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]

    experts = next((hf[key] for key in ("num_experts", "num_local_experts") if key in hf), None)
    if experts is not None:
        fields |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": hf.get("moe_intermediate_size") or hf["intermediate_size"],
            "moe_layer_freq": case["sparse"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_router_load_balancing_type": "none",
        }

    return TransformerConfig(**fields)


def start_rank(rank: int, world_size: int, sizes: dict[str, Any]) -> dict[str, int]:
    """Become a rank: Megatron's groups; return the coordinates that Megatron gives it."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=sizes.get("etp"),
        create_gloo_process_groups=False,
    )
    return {
        "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(),
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "context": parallel_state.get_context_parallel_rank(),
        "expert": parallel_state.get_expert_model_parallel_rank(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
        "expert_data": parallel_state.get_expert_data_parallel_rank(),
    }


def end_rank() -> None:
    """Be no rank."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build_chunks(case: dict[str, Any], config: Any) -> list[Any]:  # noqa: ANN401
    """Return this rank's model chunks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    hf, chunks = case["config"], []
    vpp = case["parallel"].get("vpp")
    padding = case["parallel"].get("tp", 1) * case["parallel"].get("vocabulary_divisor", 1)
    for chunk in range(vpp or 1):
        stage = chunk if vpp else None
        ends = {"ignore_virtual": False, "vp_stage": stage}
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
        )
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = NoAttention

        model = GPTModel(
            config,
            spec,
            vocab_size=-(-hf["vocab_size"] // padding) * padding,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
            vp_stage=stage,
        )
        chunks.append(model.to(config.params_dtype))  # as Float16Module does: norms are built in float32
    return chunks


def live_parameters(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Return parameters by the layout's names."""
    return dict((chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)).named_parameters())


def numbers(param: str, chunks: list[Any]) -> tuple[int | None, int | None]:
    """Return the global numbers of a parameter's layer and expert, from Megatron's own modules."""
    prefix = re.match(r"(\d+)\.", param)
    model = chunks[int(prefix[1])] if prefix else chunks[0]
    layer = re.search(r"decoder\.layers\.(\d+)\.", param)
    if layer is None:
        return None, None

    module = model.decoder.layers[int(layer[1])]
    expert = re.search(r"local_experts\.(\d+)\.", param)
    return module.layer_number - 1, None if expert is None else module.mlp.local_expert_indices[int(expert[1])]


def differences(case: dict[str, Any]) -> list[str]:
    """Return what differs between Megatron and the layout, over all ranks."""
    from dataclasses import asdict

    from engine.families import MegatronParallel, megatron_layout

    parallel = MegatronParallel(**case["parallel"])
    layout = megatron_layout(case["config"], parallel, dtype=case["dtype"])
    found: list[str] = []
    for rank in range(parallel.num_ranks):
        place = start_rank(rank, parallel.num_ranks, case["parallel"])
        if place != asdict(parallel.coordinates(rank)):
            found.append(f"rank {rank}: Megatron has {place}, the layout {asdict(parallel.coordinates(rank))}")

        chunks = build_chunks(case, transformer_config(case))
        live = {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in live_parameters(chunks).items()
        }
        wanted = {name: (spec.shape, spec.dtype) for name, spec in layout.params[rank].items()}
        found += [
            f"rank {rank}: {name} is {live.get(name)} in Megatron, {wanted.get(name)} in the layout"
            for name in sorted(live | wanted)
            if live.get(name) != wanted.get(name)
        ]
        for shard in layout.shards[rank]:
            here = [int(part[1]) for part in re.finditer(r"(?:layers|experts)\.(\d+)\.", shard.tensor)]
            there = [number for number in numbers(shard.param, chunks) if number is not None]
            if here != there:
                found.append(f"rank {rank}: {shard.param} is of {there} in Megatron, {shard.tensor} in the layout")
        end_rank()
    return found


def main(cases_file: Path, results_file: Path) -> None:
    """Write name -> differences of every case."""
    from trainers.megatron_cpu import install

    install()
    results = {name: differences(case) for name, case in json.loads(cases_file.read_text()).items()}
    results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
