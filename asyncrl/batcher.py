"""Batcher: Groups become one packed Batch, cut over DP ranks and micro-batches. Pure: same groups, same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from asyncrl.types import Group, Trajectory
from engine.types import FloatArray, WeightVersion
from trainers.advantages import group_relative
from trainers.types import Batch, LongArray, MicroBatch

_Array = TypeVar("_Array", FloatArray, LongArray)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How a batch is cut.

    Attributes:
        dp: data-parallel ranks.
        micro_batch_tokens: most positions of one micro-batch (a longer sequence gets one of its own).
        normalize_std: divide advantages by the group's standard deviation.
        pack_all: pack samples without an advantage too, because the loss has a term that moves them (entropy).
    """

    dp: int
    micro_batch_tokens: int
    normalize_std: bool
    pack_all: bool


@dataclass(frozen=True, slots=True)
class _Sequence:
    prompt_ids: LongArray  # shared by the group
    prompt_zeros: FloatArray  # as long as the prompt, shared by the group
    trajectory: Trajectory
    advantage: float
    num_tokens: int


def make_batch(step: int, groups: Sequence[Group], spec: BatchSpec) -> Batch:
    """Pack all trajectories that have a gradient.

    A trajectory whose advantage is 0 (its whole group got the same reward) has none from the policy's loss: unless
    `pack_all`, it is not packed. Its tokens stay in the denominator: the loss is the mean over the step's tokens.
    """
    sequences: list[_Sequence] = []
    num_loss_tokens = 0
    for group in groups:
        rewards = np.array([trajectory.reward for trajectory in group.trajectories], np.float64)
        advantages = group_relative(rewards, normalize_std=spec.normalize_std)
        prompt_ids = np.array(group.prompt.token_ids, np.int64)
        prompt_zeros = np.zeros(len(prompt_ids), np.float32)
        for trajectory, advantage in zip(group.trajectories, advantages.tolist(), strict=True):
            num_trained = int(np.count_nonzero(trajectory.loss_mask))
            num_loss_tokens += num_trained
            if (advantage != 0.0 or spec.pack_all) and num_trained:
                num_tokens = len(prompt_ids) + len(trajectory.token_ids)
                sequences.append(_Sequence(prompt_ids, prompt_zeros, trajectory, advantage, num_tokens))
    shares = _spread(sequences, spec.dp)
    oldest = [v for s in sequences if (v := _oldest_trained(s.trajectory)) is not None]
    return Batch(
        step=step,
        micro_batches=tuple(_cut(share, spec.micro_batch_tokens) for share in shares),
        num_loss_tokens=num_loss_tokens,
        oldest_version=min(oldest) if oldest else None,
    )


def _oldest_trained(trajectory: Trajectory) -> WeightVersion | None:
    """The oldest version that computed a token with a gradient; tokens that are masked out may be older."""
    if len(trajectory.versions) == 1:
        return trajectory.versions[0].version

    mask = trajectory.loss_mask
    return min((span.version for span in trajectory.versions if mask[span.start : span.stop].any()), default=None)


def _spread(sequences: list[_Sequence], dp: int) -> list[list[_Sequence]]:
    """Give every DP rank about the same number of positions: longest first, to the rank that has least so far."""
    ordered = sorted(sequences, key=lambda s: -s.num_tokens)  # stable: ties keep the run's order
    if dp == 1:
        return [ordered]

    shares: list[list[_Sequence]] = [[] for _ in range(dp)]
    loads = [0] * dp
    for sequence in ordered:
        rank = loads.index(min(loads))
        shares[rank].append(sequence)
        loads[rank] += sequence.num_tokens
    return shares


def _cut(sequences: Sequence[_Sequence], micro_batch_tokens: int) -> tuple[MicroBatch, ...]:
    """Cut one rank's share by the token budget. A rank without a share gets one masked position: it must take part."""
    micro_batches: list[MicroBatch] = []
    start = num_positions = 0
    for index, sequence in enumerate(sequences):
        num_more = sequence.num_tokens - 1
        if index > start and num_positions + num_more > micro_batch_tokens:
            micro_batches.append(_pack(sequences[start:index]))
            start, num_positions = index, 0
        num_positions += num_more
    if start < len(sequences):
        micro_batches.append(_pack(sequences[start:]))
    return tuple(micro_batches) if micro_batches else (_masked_micro_batch(),)


def _pack(sequences: Sequence[_Sequence]) -> MicroBatch:
    """Lay the sequences one after the other, then drop each one's last token (nothing follows) or first (no label)."""
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    stops = np.cumsum(lengths)
    is_read, is_label = np.ones(stops[-1], np.bool_), np.ones(stops[-1], np.bool_)
    is_read[stops - 1] = False
    is_label[stops - lengths] = False
    tokens = np.concatenate([part for s in sequences for part in (s.prompt_ids, s.trajectory.token_ids)])
    mask = np.concatenate([part for s in sequences for part in (s.prompt_zeros, s.trajectory.loss_mask)])
    logprobs = np.concatenate([part for s in sequences for part in (s.prompt_zeros, s.trajectory.generator_logprobs)])
    advantages = np.repeat(np.array([s.advantage for s in sequences], np.float32), lengths)
    return MicroBatch(
        token_ids=_frozen(tokens.astype(np.int64, copy=False)[is_read]),
        labels=_frozen(tokens.astype(np.int64, copy=False)[is_label]),
        lengths=tuple((lengths - 1).tolist()),
        loss_mask=_frozen(mask[is_label]),
        advantages=_frozen((advantages * mask)[is_label]),
        generator_logprobs=_frozen((logprobs * mask)[is_label]),
    )


def _masked_micro_batch() -> MicroBatch:
    token, zero = _frozen(np.zeros(1, np.int64)), _frozen(np.zeros(1, np.float32))
    return MicroBatch(
        token_ids=token, labels=token, lengths=(1,), loss_mask=zero, advantages=zero, generator_logprobs=zero
    )


def _frozen(joined: _Array) -> _Array:
    joined.flags.writeable = False
    return joined
