"""The cases of benchmarks/reshard.py: a model and two layouts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engine.families import megatron_layout, vllm_layout
from engine.layout import DTYPE_BYTES, Layout
from engine.plan import Plan, make_plan

BUCKET_BYTES = 16 << 20

_DENSE: Mapping[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}  # 0.16 G parameters


_EXPERTS: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # 0.12 G parameters, 0.1 G of them in experts


@dataclass(frozen=True)
class Case:
    """One way between two layouts. Process r is training rank r and rank r % infer_tp of replica r // infer_tp.

    Attributes:
        train: sizes of `megatron_layout`.
        infer_tp, num_replicas: of the generators; num_replicas * infer_tp processes hold parameters.
        ways: what this engine is compared with.
    """

    train: Mapping[str, int]
    infer_tp: int
    num_replicas: int
    ways: tuple[str, ...] = ("gather", "gather, p2p", "megatron", "vllm")
    hf_config: Mapping[str, Any] = field(default_factory=lambda: _DENSE)
    dtype: str = "bfloat16"

    @cached_property
    def source(self) -> Layout:
        return megatron_layout(self.hf_config, **self.train, dtype=self.dtype)

    @cached_property
    def target(self) -> Layout:
        return vllm_layout(self.hf_config, tp=self.infer_tp, dtype=self.dtype)

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.source, self.target, bucket_bytes=BUCKET_BYTES)

    @property
    def num_processes(self) -> int:
        return max(self.source.num_ranks, self.infer_tp * self.num_replicas)

    @property
    def receiver_bytes(self) -> int:
        """Bytes that one inference rank needs (the largest), padding excluded."""
        return max(self._needed(rank) for rank in range(self.infer_tp))

    @property
    def bytes_over_bound(self) -> float:
        """Bytes that the plan moves over those that must be."""
        return self.plan.num_bytes / sum(self._needed(rank) for rank in range(self.infer_tp))

    def _needed(self, rank: int) -> int:
        return sum(shard.box.num_elements for shard in self.target.shards[rank]) * DTYPE_BYTES[self.dtype]


CASES: Mapping[str, Case] = {
    "tp4-tp2x2": Case({"tp": 4, "pp": 1, "dp": 1}, infer_tp=2, num_replicas=2),
    # Megatron's resharding takes the wrong experts when expert parallelism changes; the vLLM way is for dense models.
    "ep4-tp2x2": Case(
        {"tp": 1, "pp": 1, "dp": 4, "ep": 4},
        infer_tp=2,
        num_replicas=2,
        ways=("gather", "gather, p2p"),
        hf_config=_EXPERTS,
    ),
    "tp2pp2-tp2": Case({"tp": 2, "pp": 2, "dp": 1}, infer_tp=2, num_replicas=1),
}
