"""What a generator replica needs of an engine, and of what brings weights to it.

`engine.vllm_engine` implements and documents both over vLLM with one rank, `engine.vllm_parallel` with several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.layout import TensorSpec
from engine.types import Manifest, Sampling
from engine.vllm_engine import FinishedSample

if TYPE_CHECKING:
    from engine.plan import Plan


class WeightReceiver(Protocol):
    """What brings versions to an engine; `engine.receiver.Receiver` documents it."""

    @property
    def poisoned(self) -> bool: ...

    def prepare(self, manifest: Manifest) -> None: ...

    def apply(self, manifest: Manifest) -> tuple[set[str], int]: ...

    def close(self) -> None: ...


class InferenceEngine(Protocol):
    """What a replica needs of an engine; `engine.vllm_engine.VllmEngine` documents and implements it."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def worker_pids(self) -> tuple[int, ...]: ...

    def param_specs(self) -> tuple[Mapping[str, TensorSpec], ...]: ...

    def attach(self, plan: Plan, folder: Path, num_slots: int) -> WeightReceiver: ...

    async def died(self) -> str: ...

    def add(
        self,
        request_ids: Sequence[str],
        prompt_ids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        priority: int,
    ) -> None: ...

    def step(self) -> list[FinishedSample]: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def repack(self, touched: Iterable[str] | None) -> int: ...

    def reset_prefix_cache(self) -> None: ...

    def close(self) -> None: ...
