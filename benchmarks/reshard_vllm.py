"""vLLM's packed full tensors and layerwise reload, as a contender of benchmarks/reshard.py.

Training rank 0 gathers whole tensors (point to point), packs them with vLLM's own `pack_tensors` and broadcasts the
buffer over gloo (vLLM's own broadcast wants NCCL); each inference rank loads its part through vLLM's layerwise reload,
which also packs the layers for the kernels.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reshard_ways import Gather, Step, World

from engine.families import canonical_layout
from engine.plan import make_plan
from engine.vllm_cpu import worker_environment


class Vllm:
    """One vLLM model with this rank's part of the tensor parallelism; no engine around it."""

    def __init__(self, world: World) -> None:
        os.environ.update(worker_environment(1))
        os.environ["VLLM_DIST_IDENT"] = f"reshard-{world.rank}"  # a name of its own a rank: no shared memory among them
        case = world.case
        self._is_target = world.is_target
        layout = canonical_layout(case.hf_config, dtype=case.dtype)
        plan = make_plan(case.source, layout, bucket_bytes=16 << 20)
        self._whole = {
            name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in layout.tensors.items()
        }
        wanted = self._whole if world.rank == 0 else {}
        self._gather = Gather(world, plan, wanted, 0, point_to_point=True).steps[0][1]
        self._model, self._model_config = _load_model(world)
        num_bytes = sum(spec.num_bytes for spec in layout.tensors.values())
        self._packed = torch.empty(num_bytes, dtype=torch.uint8)
        self.steps: tuple[Step, ...] = (
            ("gather", self._gather),
            ("pack and broadcast", self._broadcast),
            ("reload", self._reload),
        )
        for _, work in self.steps:
            work()
        self._check(world)

    def _broadcast(self) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

        if dist.get_rank() == 0:
            chunk = pack_tensors(iter(self._whole.items()), lambda item: item[1], 1 << 30)
            assert chunk is not None
            self._packed = chunk.packed_tensor
        dist.broadcast(self._packed, 0)

    @torch.no_grad()
    def _reload(self) -> None:
        if not self._is_target:
            return

        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        tensors = list(self._whole.items())
        weights = unpack_tensor(
            self._packed,
            [name for name, _ in tensors],
            [list(tensor.shape) for _, tensor in tensors],
            [tensor.dtype for _, tensor in tensors],
            [tensor.nbytes for _, tensor in tensors],
        )
        initialize_layerwise_reload(self._model)
        self._model.load_weights(iter(weights))
        finalize_layerwise_reload(self._model, self._model_config)

    def _check(self, world: World) -> None:
        """The norms are what is left to look at: a CPU's packing empties every other weight."""
        if not self._is_target:
            return

        found = dict(self._model.named_parameters())
        for name, spec in world.case.target.params[world.target_rank].items():
            if "norm" in name:
                assert tuple(found[name].shape) == spec.shape, name
                assert torch.equal(found[name].view(torch.int16), self._unpacked(name).view(torch.int16)), name

    def _unpacked(self, name: str) -> torch.Tensor:
        """A whole tensor's place in the broadcast buffer."""
        start = 0
        for other, tensor in self._whole.items():
            if other == name:
                return self._packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

            start += tensor.nbytes
        raise AssertionError(name)

    def close(self) -> None:
        """vLLM's groups go with the process."""


def _load_model(world: World) -> tuple[Any, Any]:
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model

    torch.accelerator.empty_cache = lambda: None  # what vLLM's CPU model runner does too
    with tempfile.TemporaryDirectory() as folder:
        content = {**world.case.hf_config, "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"}
        Path(folder, "config.json").write_text(json.dumps(content))
        config = EngineArgs(
            model=folder,
            dtype=world.case.dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            tensor_parallel_size=world.case.infer_tp,
            kv_cache_memory_bytes=64 << 20,
        ).create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(dist.get_world_size(), world.rank, "env://", world.rank, "gloo")
            initialize_model_parallel(world.case.infer_tp)
            model = get_model(vllm_config=config) if world.is_target else None
    return model, config.model_config
