"""Where things come from: the run's folder, the model, the prompts and the reward."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from asyncrl.schema.base import Count, Section

CHAR_VOCAB_SIZE = 64
"""Tokens of the character tokenizer that a fresh model gets; `asyncrl.tokenizer` builds it."""


class Run(Section):
    """Where the run lives."""

    name: str = Field(
        default="run", min_length=1, description="Short name of the run; part of its default folder and its wandb name."
    )
    dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of this run, private to the user; null: runs/<name>-<date>-<time>.",
    )

    def folder(self, started: datetime) -> Path:
        """Return the run's folder; `started` enters its name where the recipe gives none."""
        return Path(self.dir if self.dir is not None else f"runs/{self.name}-{started:%Y%m%d-%H%M%S}")


class FreshModel(Section):
    """A small random model with the character tokenizer (64 tokens) that the project ships."""

    family: Literal["qwen2"] = Field(
        default="qwen2", description="Architecture; written as a Hugging Face model of that family."
    )
    hidden_size: Count = Field(description="Width of the residual stream.")
    num_hidden_layers: Count = Field(description="Transformer blocks.")
    num_attention_heads: Count = Field(description="Query heads; divides hidden_size.")
    num_key_value_heads: Count = Field(description="Key/value heads; divides num_attention_heads.")
    intermediate_size: Count = Field(description="Width of the gated feed-forward layer.")
    tie_word_embeddings: bool = Field(default=True, description="Whether the output layer shares the input embedding.")
    max_position_embeddings: Count = Field(
        default=64, description="Longest sequence that the model is made for, in tokens."
    )
    rope_theta: float = Field(default=10000.0, gt=0, description="Base of the rotary embedding's wave lengths.")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


class Model(Section):
    """The model that is trained: exactly one of `path` and `fresh`."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="A Hugging Face folder on this machine, or the id of a model on the hub.",
    )
    revision: str | None = Field(
        default=None, min_length=1, description="Branch, tag or commit of a hub id; null: its default."
    )
    fresh: FreshModel | None = Field(default=None, description="A random model of this shape instead.")


class Source(Section):
    """Where prompts come from: exactly one of `path` and `task`."""

    path: str | None = Field(
        default=None, min_length=1, description="A .jsonl or .parquet file with `prompt`, `answer` and optionally `id`."
    )
    task: str | None = Field(
        default=None, min_length=1, description='A procedural source by import path, for instance "asyncrl.tasks:copy".'
    )
    args: dict[str, JsonValue] | None = Field(default=None, description="Keyword arguments of the task.")


class Data(Section):
    """Training and held-out prompts. An evaluation prompt never occurs in training."""

    train: Source = Field(description="Prompts that are trained on.")
    eval: Source | None = Field(
        default=None,
        description="Prompts of the held-out evaluation; null: held-out prompts of the same task (not of a file).",
    )


class Reward(Section):
    """How a response is scored."""

    function: str = Field(
        min_length=1,
        description='Import path "module:function" or "path/to/file.py:function"; built in: asyncrl.rewards.',
    )
    args: dict[str, JsonValue] | None = Field(default=None, description="Keyword arguments of the function.")
    weight: float = Field(default=1.0, description="Multiplies the reward.")
