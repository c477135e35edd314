"""Megatron-Core 0.16 on a CPU: everything that must be bent for dense GPT models under TP, PP and DP on gloo.

The patches are process-wide. Keep vLLM and Hugging Face models out of a process that has called `install`. With a CUDA
device `install` does nothing, and nothing in this file is used.
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

_VERSION = "0.16."
_MARK = "_asyncrl_megatron_cpu"
_NOT_NEEDED = ("wandb", "triton")
_FACTORIES = ("tensor", "zeros")


def install() -> None:
    """Make megatron.core work without CUDA. Call before the first import of megatron; calling again does nothing.

    Raises:
        RuntimeError: megatron-core is not the version that the patches were written for.
    """
    if torch.cuda.is_available() or hasattr(torch, _MARK):
        return

    setattr(torch, _MARK, True)
    _patch_device()
    _patch_random_state()
    _import_lightly()
    _patch_optimizer_import()
    _silence_runtime_warnings()

    import megatron.core

    if not megatron.core.__version__.startswith(_VERSION):
        raise RuntimeError(
            f"megatron-core {megatron.core.__version__} is installed, but its CPU patches are for {_VERSION}x: "
            "install the version of the lock file"
        )

    _patch_megatron_random_state()
    _patch_packed_rotary()
    _patch_optimizer_checkpoint()


def _patch_device() -> None:
    """Let "the current CUDA device" be the CPU."""
    cpu = torch.device("cpu")
    # Megatron creates buffers with device=torch.cuda.current_device().
    _set(torch.cuda, "current_device", lambda: cpu)
    # ... and others with device="cuda". PyTorch collects its device constructors on first use and compares by identity,
    # so collect them before they are wrapped, or `with torch.device(...)` stops working.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in _FACTORIES:
        _set(torch, name, _without_cuda(getattr(torch, name)))
    # The tied embedding of the last pipeline stage is moved with `.cuda()`.
    _set(torch.Tensor, "cuda", lambda self, *_, **__: self)
    # Gradient clipping and the distributed optimizer compare `param.type()` with 'torch.cuda.FloatTensor'.
    plain_type: Callable[..., object] = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        if args or kwargs:
            return plain_type(self, *args, **kwargs)

        return str(plain_type(self)).replace("torch.", "torch.cuda.", 1)

    _set(torch.Tensor, "type", cuda_type)
    # Pipeline communication, checkpoints and our own clocks wait for the device.
    _set(torch.cuda, "synchronize", lambda *_, **__: None)


def _without_cuda(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: object, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _patch_random_state() -> None:
    """Megatron's tracker of CUDA random states then tracks the CPU's generator."""
    _set(torch.cuda, "manual_seed", torch.manual_seed)
    _set(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())


def _import_lightly() -> None:
    """Import Megatron without what it only tries to import for its inference server (half of the time), and without
    torch.compile, with which it decorates functions while it is imported: compiling them costs more than it saves here.
    """
    compiler = torch.compile

    def keep(function: Callable[..., object] | None = None, **_: object) -> object:
        return function if function is not None else lambda decorated: decorated

    absent = [name for name in _NOT_NEEDED if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]  # makes `import` raise ImportError
    _set(torch, "compile", keep)
    try:
        # It also says six times that Apex and Transformer Engine are missing, which on a CPU they always are.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
            _import_megatron()
    finally:
        torch.compile = compiler
        for name in absent:
            del sys.modules[name]


def _import_megatron() -> None:
    import megatron.core.jit

    megatron.core.jit.disable_jit_fuser()
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer.distrib_optimizer


def _patch_optimizer_import() -> None:
    """torch.optim imports torch._dynamo at its first call (a second, 100 MB): it keeps a compiler away that never runs.

    `torch._compile._disable_dynamo` keeps what it got from there on the function itself: put the function there. The
    wrapper of `step` switches gradients off and asks the compiler for graph breaks: do without the second.
    """
    for name in ("add_param_group", "state_dict", "load_state_dict"):
        function = getattr(torch.optim.Optimizer, name).__wrapped__
        function.__dynamo_disable = function
    _set(torch.optim.Adam, "step", torch.no_grad()(torch.optim.Adam.step.__wrapped__))  # type: ignore[attr-defined]


def _silence_runtime_warnings() -> None:
    """What this pair of versions says in every run, and nobody here can change."""
    for message in (
        r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",  # Megatron calls them
        r"The \.grad attribute of a Tensor that is not a leaf",  # the distributed optimizer asks for it
        r"full scope is deprecated",  # about Megatron's own default
    ):
        warnings.filterwarnings("ignore", message=message)
    # "CPU RNG state changed within GPU RNG context": here the two are one, and the tracker puts the state back.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _patch_megatron_random_state() -> None:
    """The tracker's own accessors go to torch's CUDA internals."""
    from megatron.core.tensor_parallel import random

    _set(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    _set(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))


def _patch_packed_rotary() -> None:
    """Fill the place of Transformer Engine's fused kernel: Megatron's own code loops over the sequences in Python."""
    from megatron.core.models.common.embeddings import rope_utils

    from trainers.fused_cpu import rotate_packed

    _set(rope_utils, "fused_apply_rotary_pos_emb_thd", rotate_packed)


def _patch_optimizer_checkpoint() -> None:
    """DistributedOptimizer over torch's AdamW (no Apex, no Transformer Engine) neither saves nor loads as it is.

    Its state has a "step" tensor a parameter. Megatron saves it apart and forgets that it is there: loading looks for
    it among the tensors of the parameter (KeyError), and hands ONE tensor to all parameters, which AdamW then advances
    once a parameter (a silently wrong resume). Saving before the first step finds no state at all.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    sharded_state_dict = DistributedOptimizer.sharded_state_dict

    def set_states_with_own_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:  # noqa: ANN401
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        with torch.no_grad():
            set_states(self, model_param, {"step": state["step"], **tensors})

    def sharded_state_dict_with_state(self: Any, *args: object, **kwargs: object) -> object:  # noqa: ANN401
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[param] = {"step": torch.tensor(0.0), **moments}
        return sharded_state_dict(self, *args, **kwargs)

    _set(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states_with_own_step)
    _set(DistributedOptimizer, "sharded_state_dict", sharded_state_dict_with_state)


def _set(owner: object, name: str, value: object) -> None:
    setattr(owner, name, value)
