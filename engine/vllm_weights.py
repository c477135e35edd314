"""The live weights of one rank of a vLLM replica: received in place, and packed again for the kernels.

The same for the one rank of a replica that computes in the generator's process and for every tensor-parallel worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.layout import TensorSpec

if TYPE_CHECKING:
    import torch

    from engine.plan import Plan
    from engine.receiver import Receiver


class LiveWeights:
    """The parameters of one rank, by vLLM's names; a tied output head is the embedding and has no name of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Args:
        model: vLLM's, loaded after `engine.vllm_cpu.prepare_process`.
        """
        from engine.vllm_cpu import needs_repack, packed_layers

        self._params: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._packed_layers = packed_layers(model) if needs_repack() else {}

    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every parameter."""
        return {
            name: TensorSpec(tuple(param.shape), str(param.dtype).removeprefix("torch."))
            for name, param in self._params.items()
        }

    def receiver(self, plan: Plan, rank: int, folder: Path, num_slots: int) -> Receiver:
        """Connect the parameters with the run's shared memory, as rank `rank` of the plan's target.

        Raises:
            WeightTransferError: the parameters are not those of the plan.
        """
        from engine.receiver import Receiver

        return Receiver(plan, rank, self._params, folder, num_slots)

    def repack(self, touched: Iterable[str] | None) -> int:
        """Make the kernels compute with parameters that were just written, None for all; the number of layers."""
        from engine.vllm_cpu import repack

        return repack(self._packed_layers, touched if touched is not None else self._params)
