"""Prompt, Trajectory, Group: what the rollout side hands on. All frozen; a later stage makes a new object."""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import FloatArray, IntArray, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question of the training or evaluation set, tokenized.

    Attributes:
        uid: stable name of the row, the same in every run and epoch, for instance "copy-000017".
        index: place in the run's order, counted from 0 over all epochs; step = index // prompts_per_step.
        text: the prompt as the model reads it, after the chat template.
        token_ids: `text` tokenized.
        answer: what the reward function compares with.
    """

    uid: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens [start, stop) of a response were computed by `version`."""

    start: int
    stop: int
    version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One scored response to one prompt.

    Attributes:
        prompt_uid, sample_index: which sample of which prompt.
        draw: rises only when the rollout's own content asked for another one; enters the seed.
        attempt: executions of the same rollout (crash, timeout); never enters a seed.
        token_ids: int32 [n], the response, end token included.
        loss_mask: float32 [n], 1 where the model wrote the token.
        generator_logprobs: float32 [n].
        versions: spans that cover [0, n) without gaps, in order.
        text: the response as the reward function read it, without the end token.
        reward: as the reward function returned it.
        correct: whether the answer counts as right, for accuracy; None if the reward function does not say.
        finish_reason: "stop" or "length".

    Example: a response of 5 tokens that lived through one publish after its third token has
    versions (VersionSpan(start=0, stop=3, version=7), VersionSpan(start=3, stop=5, version=8)).
    """

    prompt_uid: str
    sample_index: int
    draw: int
    attempt: int
    token_ids: IntArray
    loss_mask: FloatArray
    generator_logprobs: FloatArray
    versions: tuple[VersionSpan, ...]
    text: str
    reward: float
    correct: bool | None
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """A sample that ended without a trajectory: data, not an exception."""

    prompt_uid: str
    sample_index: int
    attempt: int
    reason: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of one prompt, all terminal. A group that lost everything still travels, empty, and frees its slot.

    Attributes:
        prompt: the prompt that was answered.
        trajectories: what was written and scored, by sample index.
        failures: what was not, with the reason.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    failures: tuple[SampleFailure, ...] = ()
