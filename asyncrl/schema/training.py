"""The learning side: algorithm, schedule, trainer and the publishing of its weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.schema.base import Count, Cpus, Dtype, Seconds, Section


class Algorithm(Section):
    """The loss. GRPO: arXiv 2402.03300 equation 3, token mean as in DAPO (arXiv 2503.14476 equation 8)."""

    name: Literal["grpo"] = Field(default="grpo", description="Group-relative policy optimization.")
    normalize_std: bool = Field(
        default=True, description="Divide a group's advantages by the deviation of its rewards."
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(
        default=0.28, gt=0, description="The ratio is clipped above 1 + clip_high (DAPO's clip-higher)."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus in the loss.")


class Schedule(Section):
    """How far generation may run ahead of training, and what happens to samples that fail."""

    max_staleness: int = Field(
        default=1,
        ge=0,
        description="Versions that a trained token may be old; 0 is synchronous, 1 overlaps both sides.",
    )
    order: Literal["strict"] = Field(
        default="strict",
        description="Groups are trained in prompt order.",
        json_schema_extra={"not_yet": ["ready"]},
    )
    update: Literal["drain"] = Field(
        default="drain",
        description="A generator takes new weights when all samples of its version are done.",
        json_schema_extra={"not_yet": ["inflight"]},
    )
    stale: Literal["wait"] = Field(
        default="wait",
        description="Nothing is ever thrown away for being old.",
        json_schema_extra={"not_yet": ["drop"]},
    )
    max_attempts: Count = Field(default=3, description="Executions of one sample before it counts as failed.")
    max_failure_rate: float = Field(
        default=0.2, ge=0, le=1, description="A step that lost a larger share of its samples than this ends the run."
    )

    @property
    def num_slots(self) -> int:
        """Versions that the weight store holds at once: those that open samples may need, and the one being written."""
        return self.max_staleness + 2


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Section):
    """AdamW (arXiv 1711.05101), Megatron-Core's."""

    lr: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="Decay of the first and the second moment.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    grad_clip: float = Field(default=1.0, ge=0, description="Largest gradient norm; 0: no clipping.")
    distributed: bool = Field(default=True, description="Shard the optimizer's state over the data-parallel ranks.")


class LrSchedule(Section):
    """Learning rate over the steps."""

    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from 0.")
    decay: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Shape of the decay.")
    decay_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the run, at its end, over which the rate decays; constant before.",
    )
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="What is left of the peak at the last step.")


class TrainerSection(Section):
    """The Megatron-Core side: `tp * pp * dp` processes."""

    num_steps: Count = Field(description="Training steps of the run; each makes one weight version.")
    prompts_per_step: Count = Field(description="Prompt groups that one step trains on.")
    samples_per_prompt: Count = Field(description="Responses to each prompt (the group of GRPO).")
    tp: Count = Field(default=1, description="Tensor-parallel ranks.")
    pp: Count = Field(default=1, description="Pipeline stages.")
    dp: Count = Field(default=1, description="Data-parallel ranks.")
    dtype: Dtype = Field(default="float32", description="Type of the weights that are computed with.")
    micro_batch_tokens: Count = Field(default=4096, description="Most positions that are packed into one micro-batch.")
    optimizer: Optimizer = Field(default=Optimizer(), description="AdamW.")
    lr_schedule: LrSchedule = Field(default=LrSchedule(), description="Learning rate over the steps.")
    threads: Count = Field(default=1, description="Compute threads of each rank (CPU).")
    cpus: Cpus = Field(
        default="auto", description="Cores of all ranks together; auto: apart from the generator's; none: not pinned."
    )

    @property
    def world_size(self) -> int:
        """Training processes."""
        return self.tp * self.pp * self.dp

    @property
    def num_samples_per_step(self) -> int:
        """Responses that one step trains on."""
        return self.prompts_per_step * self.samples_per_prompt


class Publish(Section):
    """How a weight version travels from trainer to generator."""

    bucket_mb: float = Field(default=4.0, gt=0, description="Size of one bucket in MiB; copies are cut into buckets.")
    prepare_deadline_s: Seconds = Field(
        default=60.0, description="A replica must have verified a version within this time."
    )
    flip_deadline_s: Seconds = Field(
        default=60.0, description="A replica must have applied a version within this time."
    )

    @property
    def bucket_bytes(self) -> int:
        """Size of one bucket in bytes, a multiple of 64."""
        return max(64, int(self.bucket_mb * 2**20) // 64 * 64)
