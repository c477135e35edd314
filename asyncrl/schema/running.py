"""The generating side and all around the loop: evaluation, checkpoints, tracking, cluster."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncrl.schema.base import Count, Cpus, Dtype, Seconds, Section


class GeneratorSection(Section):
    """The vLLM side: `num_replicas` engines, `tp` ranks each."""

    num_replicas: Count = Field(default=1, description="Engines that share the prompts of a step.")
    tp: Count = Field(default=1, description="Tensor-parallel ranks of one replica.")
    dtype: Dtype = Field(default="float32", description="Type of the weights that are computed with.")
    max_model_len: Count = Field(description="Longest sequence, prompt and response, in tokens.")
    max_new_tokens: Count = Field(description="Longest response in tokens, the end token included.")
    temperature: float = Field(
        default=1.0, gt=0, description="Divides the logits when sampling for training and evaluation."
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus cut (only 1.0, off, for now).")
    top_k: int = Field(default=0, ge=0, description="Top-k cut (only 0, off, for now).")
    max_num_seqs: Count = Field(default=256, description="Sequences that one replica decodes together.")
    kv_cache_mb: Count | None = Field(
        default=None,
        description="Memory of one replica's KV cache in MiB; null: 256 on a CPU, 0.9 of a GPU less weights.",
    )
    threads: Count = Field(default=1, description="Compute threads of each rank (CPU).")
    cpus: Cpus = Field(
        default="auto", description="Cores of all replicas together; auto: apart from the trainer's; none: not pinned."
    )


class Evaluation(Section):
    """Held-out evaluation, beside training; training's bits do not depend on it."""

    every: int = Field(default=0, ge=0, description="Evaluate version 0, every n-th and the last one; 0: never.")
    num_prompts: Count = Field(default=128, description="Held-out prompts.")
    samples_per_prompt: Count = Field(default=1, description="Sampled responses to each held-out prompt.")
    greedy: bool = Field(default=True, description="Evaluate greedy responses too.")
    deadline_s: Seconds = Field(default=120.0, description="One evaluation must be done within this time.")


class Checkpoint(Section):
    """What the run leaves on disk."""

    every: int = Field(
        default=0, ge=0, description="Write a checkpoint and a Hugging Face folder every n steps; 0: at the end."
    )
    keep_last: Count = Field(default=2, description="Checkpoints that are kept.")


class Wandb(Section):
    """Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = Field(
        default="auto", description="auto: online where there is a key, offline otherwise; disabled: off."
    )
    project: str = Field(default="asyncrl", min_length=1, description="wandb project.")
    entity: str | None = Field(default=None, min_length=1, description="wandb team or user; null: the key's default.")
    group: str | None = Field(
        default=None, min_length=1, description="wandb group, for instance the seeds of one experiment."
    )
    tags: tuple[str, ...] = Field(default=(), description="wandb tags.")


class Tracking(Section):
    """Where the metrics go, besides metrics.jsonl in the run's folder."""

    wandb: Wandb = Field(default=Wandb(), description="Weights & Biases.")
    console: bool = Field(default=True, description="Live view on a terminal; plain lines elsewhere or when false.")
    sample_rollouts: int = Field(
        default=4, ge=0, description="Rollouts of a step that are shown in full at each evaluation."
    )


class Cluster(Section):
    """Machines and patience. Every wait for another process has one of these deadlines."""

    address: str | None = Field(
        default=None, min_length=1, description="Address of a running Ray cluster; null: start one on this machine."
    )
    devices: Literal["auto"] | Count = Field(
        default="auto",
        description="Slots for workers; auto: the GPUs, or the cores where there is no GPU. "
        "On a CPU it may exceed the cores.",
    )
    placement_deadline_s: Seconds = Field(
        default=60.0, description="All workers must have been placed within this time."
    )
    start_deadline_s: Seconds = Field(
        default=180.0, description="Every worker must have loaded its model within this time."
    )
    call_deadline_s: Seconds = Field(
        default=600.0, description="One call of a worker (a step, a batch) must end within it."
    )
    stop_deadline_s: Seconds = Field(
        default=30.0, description="After the last step every worker must have ended its work within this time."
    )
