"""What crosses the trainer's process border: specs and Batch in, StepResult out. All frozen, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.types import FloatArray, WeightVersion

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Several sequences packed one after the other; T positions in all.

    A sequence of n tokens (prompt and response) gives n - 1 positions: position t reads token t and predicts t + 1.

    Attributes:
        token_ids: int64 [T], the tokens that are read.
        labels: int64 [T], the tokens that are predicted.
        lengths: positions of each packed sequence; `sum(lengths) == T`.
        loss_mask: float32 [T], 1 where the label is a response token that is trained on.
        advantages: float32 [T], the label's advantage; 0 where the mask is 0.
        generator_logprobs: float32 [T], the generator's logprob of the label; 0 where the mask is 0.

    Example: prompt [1, 9], response [5, 6, 2] gives token_ids [1, 9, 5, 6], labels [9, 5, 6, 2] and
    loss_mask [0, 1, 1, 1].
    """

    token_ids: LongArray
    labels: LongArray
    lengths: tuple[int, ...]
    loss_mask: FloatArray
    advantages: FloatArray
    generator_logprobs: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Everything that one training step consumes.

    Attributes:
        step: counted from 0; the step turns version `step` into `step + 1`.
        micro_batches: [DP rank][micro-batch]. Every DP rank has at least one (an all-masked one if need be).
        num_loss_tokens: the global denominator, over all DP ranks and micro-batches. It also counts the tokens of
            samples that were left out of the packing because their advantage is 0: they have no gradient, but they
            are part of the mean.
        oldest_version: the oldest weight version that computed a trained token, for the staleness measured at
            consumption; None if the batch is empty.
    """

    step: int
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    num_loss_tokens: int
    oldest_version: WeightVersion | None

    @property
    def is_empty(self) -> bool:
        """True if no token of the batch has a gradient: the step then makes a version of the same bits."""
        return not any(micro.loss_mask.any() for rank in self.micro_batches for micro in rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one training step did, over all ranks.

    Attributes:
        step: the step that was trained.
        version: the version it made, `step + 1`.
        loss: token mean over the batch (float64 sum over the ranks, divided by `num_loss_tokens`).
        grad_norm: before clipping.
        lr: learning rate that was used.
        entropy, clip_fraction, ratio_max, generator_kl: means over the trained tokens (ratio_max: maximum);
            `generator_kl` is the k3 estimate of KL(generator || trainer).
        num_tokens: positions that went through the model.
        digests: bucket id -> xxh3_128, of the snapshot taken right after the optimizer step; empty if skipped.
        skipped: no token had a gradient; the weights did not move.
        timings_ms: forward_backward, optimizer, snapshot, total: the slowest rank's.
        peak_memory_bytes: per rank, in rank order.
    """

    step: int
    version: WeightVersion
    loss: float
    grad_norm: float
    lr: float
    entropy: float
    clip_fraction: float
    ratio_max: float
    generator_kl: float
    num_tokens: int
    digests: Mapping[int, str]
    skipped: bool
    timings_ms: Mapping[str, float]
    peak_memory_bytes: tuple[int, ...]

    @classmethod
    def skip(cls, step: int) -> StepResult:
        """The result of a step without a gradient: a version of the same bits, and nothing ran."""
        return cls(
            step=step,
            version=WeightVersion(step + 1),
            loss=0.0,
            grad_norm=0.0,
            lr=0.0,
            entropy=0.0,
            clip_fraction=0.0,
            ratio_max=1.0,
            generator_kl=0.0,
            num_tokens=0,
            digests={},
            skipped=True,
            timings_ms={},
            peak_memory_bytes=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """AdamW and its learning rate.

    Attributes:
        lr: peak learning rate, after warm-up.
        betas, eps, weight_decay: of AdamW (arXiv 1711.05101, algorithm 2). Biases and norms are not decayed.
        clip_grad: largest gradient norm; 0 switches clipping off.
        distributed: shard master weights and moments over the DP ranks (ZeRO-1, arXiv 1910.02054).
        schedule: what the learning rate does after warm-up.
        warmup_steps: step s < warmup_steps uses lr * (s + 1) / warmup_steps.
        decay_start: step up to which the peak is kept; not before the warm-up ends.
        decay_steps: step at which "linear" and "cosine" have come down to lr * min_lr_ratio, and stay there.
        min_lr_ratio: see `decay_steps`.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    distributed: bool = True
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_start: int = 0
    decay_steps: int = 0
    min_lr_ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """The objective, see `losses.policy_loss`.

    Attributes:
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        entropy_coef: how much a nat of entropy is worth.
        temperature: of the generator's sampling; the trainer's logits are divided by it too.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    entropy_coef: float = 0.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """Everything that the training ranks need to know; the same object for all of them.

    Attributes:
        model_dir: Hugging Face folder (config.json, safetensors, tokenizer) with the initial weights.
        tp, pp, dp: tensor-, pipeline- and data-parallel sizes; `tp * pp * dp` ranks.
        dtype: "float32" or "bfloat16", of parameters and activations. Master weights are always float32.
        optimizer, loss: see there.
        seed: the run's seed.
        cpus: the cores that each rank is pinned to, in rank order; None pins nothing.
        num_threads: torch threads of one rank; None is one thread a pinned core, or 1 without pinning.
        collective_timeout_s: how long a collective waits for the other ranks before it raises.
    """

    model_dir: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: OptimizerSpec
    loss: LossSpec
    seed: int
    cpus: tuple[tuple[int, ...], ...] | None = None
    num_threads: int | None = None
    collective_timeout_s: float = 300.0

    @property
    def num_ranks(self) -> int:
        """Processes of the trainer."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a training rank is, once it has started.

    Attributes:
        rank: global rank; tp_rank, pp_rank, dp_rank: its place.
        pid: of its process.
        device: "cpu" or "cuda:0".
        num_parameters: elements that the rank holds.
        timings_s: import, build (model and optimizer), load (weights).
        peak_memory_bytes: most resident memory so far.
    """

    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    pid: int
    device: str
    num_parameters: int
    timings_s: Mapping[str, float]
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What `StepResult` reports about the loss, already reduced: the same on every rank."""

    loss: float
    grad_norm: float
    lr: float
    entropy: float
    clip_fraction: float
    ratio_max: float
    generator_kl: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepResult:
    """One rank's part of a step.

    Attributes:
        metrics: the same on every rank.
        digests: bucket id -> xxh3_128, of the buckets that this rank writes.
        timings_ms: forward_backward, optimizer, snapshot, total.
        peak_memory_bytes: most resident memory so far.
    """

    metrics: StepMetrics
    digests: Mapping[int, str]
    timings_ms: Mapping[str, float]
    peak_memory_bytes: int
