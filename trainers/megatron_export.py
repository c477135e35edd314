"""A Hugging Face folder from the training ranks: tensor by tensor to rank 0, box by box. torch only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

from engine.layout import Box, Layout, Shard, TensorSpec
from trainers.megatron_model import check_parameters, torch_dtype

_MAX_FILE_BYTES = 4 << 30
_COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)


def export(parameters: Mapping[str, Tensor], layout: Layout, rank: int, source: Path, folder: Path, dtype: str) -> None:
    """Write the weights in Hugging Face's names and shapes. Collective; only rank 0 touches the folder.

    Rank 0 holds one file's tensors at a time (at most 4 GiB), no other rank holds more than its own boxes.

    Args:
        parameters: this rank's, by layout name.
        layout: of the training side.
        rank: which rank of the layout this is.
        source: the folder that the model came from: config.json and tokenizer files are taken from it.
        folder: where to; exists and is empty.
        dtype: of the written weights.
    """
    check_parameters(parameters, layout, rank)
    files = _plan_files(layout, dtype)
    for name, tensors in files.items():
        content = {tensor: _gather(tensor, parameters, layout, rank, dtype) for tensor in tensors}
        if rank == 0:
            from safetensors.torch import save_file

            save_file({t: data for t, data in content.items() if data is not None}, folder / name, {"format": "pt"})
    if rank == 0:
        _write_index(files, layout, dtype, folder)
        _copy_files(source, folder, dtype)


def _plan_files(layout: Layout, dtype: str) -> dict[str, list[str]]:
    """Spread the tensors over files of at most 4 GiB, named as Hugging Face does."""
    groups: list[list[str]] = [[]]
    size = 0
    for tensor, spec in layout.tensors.items():
        num_bytes = TensorSpec(spec.shape, dtype).num_bytes
        if groups[-1] and size + num_bytes > _MAX_FILE_BYTES:
            groups.append([])
            size = 0

        groups[-1].append(tensor)
        size += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}

    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups)}


def _gather(tensor: str, parameters: Mapping[str, Tensor], layout: Layout, rank: int, dtype: str) -> Tensor | None:
    """Return the whole tensor on rank 0, None elsewhere. Every box comes from the lowest rank that holds it."""
    spec = layout.tensors[tensor]
    whole = torch.empty(spec.shape, dtype=torch_dtype(dtype)) if rank == 0 else None
    num_elements = 0
    for holder, shard in _holders(layout, tensor):
        num_elements += shard.box.num_elements
        if rank == holder:
            block = parameters[shard.param].detach()[shard.param_slices].contiguous()
            if whole is not None:
                whole[shard.box.slices] = block.to(whole.device, whole.dtype)
            else:
                torch.distributed.send(block, dst=0)

        elif whole is not None:
            like = parameters[next(iter(parameters))]
            block = torch.empty(shard.box.shape, dtype=like.dtype, device=like.device)
            torch.distributed.recv(block, src=holder)
            whole[shard.box.slices] = block.to(whole.device, whole.dtype)

    assert num_elements == spec.num_elements, f"{tensor}: the ranks hold {num_elements} of {spec.num_elements} elements"
    return whole


def _holders(layout: Layout, tensor: str) -> Iterator[tuple[int, Shard]]:
    seen: set[Box] = set()
    for rank, shards in enumerate(layout.shards):
        for shard in shards:
            if shard.tensor == tensor and shard.box not in seen:
                seen.add(shard.box)
                yield rank, shard


def _write_index(files: Mapping[str, list[str]], layout: Layout, dtype: str, folder: Path) -> None:
    if len(files) == 1:
        return

    total = sum(TensorSpec(spec.shape, dtype).num_bytes for spec in layout.tensors.values())
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_files(source: Path, folder: Path, dtype: str) -> None:
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # transformers 4's name for it
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in _COPIED_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
