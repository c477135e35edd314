"""Batcher: Groups become one packed Batch, cut over DP ranks and micro-batches. Pure: same groups, same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.types import Group, Prompt, Trajectory
from engine.types import FloatArray
from trainers.advantages import group_relative
from trainers.types import Batch, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """How a batch is cut.

    Attributes:
        dp: data-parallel ranks.
        micro_batch_tokens: most positions of one micro-batch (a longer sequence gets one of its own).
        normalize_std: divide advantages by the group's standard deviation.
    """

    dp: int
    micro_batch_tokens: int
    normalize_std: bool


@dataclass(frozen=True, slots=True)
class _Sequence:
    prompt: Prompt
    trajectory: Trajectory
    advantage: float

    @property
    def num_positions(self) -> int:
        return len(self.prompt.token_ids) + len(self.trajectory.token_ids) - 1


def make_batch(step: int, groups: Sequence[Group], spec: BatchSpec) -> Batch:
    """Pack all trajectories that have a gradient.

    A trajectory whose advantage is 0 (its whole group got the same reward) moves nothing: it is not packed, but its
    tokens stay in the denominator, so that the loss is the mean over the step's tokens.
    """
    sequences: list[_Sequence] = []
    num_loss_tokens = 0
    for group in groups:
        rewards = np.array([trajectory.reward for trajectory in group.trajectories], np.float64)
        advantages = group_relative(rewards, normalize_std=spec.normalize_std)
        for trajectory, advantage in zip(group.trajectories, advantages.tolist(), strict=True):
            num_loss_tokens += int(trajectory.loss_mask.sum())
            if advantage != 0.0 and trajectory.loss_mask.any():
                sequences.append(_Sequence(group.prompt, trajectory, advantage))
    shares = _spread(sequences, spec.dp)
    oldest = [v for s in sequences if (v := s.trajectory.oldest_version) is not None]
    return Batch(
        step=step,
        micro_batches=tuple(_cut(share, spec.micro_batch_tokens) for share in shares),
        num_loss_tokens=num_loss_tokens,
        oldest_version=min(oldest) if oldest else None,
    )


def _spread(sequences: Sequence[_Sequence], dp: int) -> list[list[_Sequence]]:
    """Give every DP rank about the same number of positions: longest first, to the rank that has least so far."""
    shares: list[list[_Sequence]] = [[] for _ in range(dp)]
    loads = [0] * dp
    for sequence in sorted(sequences, key=lambda s: -s.num_positions):  # stable: ties keep the run's order
        rank = loads.index(min(loads))
        shares[rank].append(sequence)
        loads[rank] += sequence.num_positions
    return shares


def _cut(sequences: Sequence[_Sequence], micro_batch_tokens: int) -> tuple[MicroBatch, ...]:
    """Cut one rank's share by the token budget. A rank without a share gets one masked position: it must take part."""
    micro_batches: list[MicroBatch] = []
    current: list[_Sequence] = []
    num_positions = 0
    for sequence in sequences:
        if current and num_positions + sequence.num_positions > micro_batch_tokens:
            micro_batches.append(_pack(current))
            current, num_positions = [], 0
        current.append(sequence)
        num_positions += sequence.num_positions
    if current:
        micro_batches.append(_pack(current))
    return tuple(micro_batches) if micro_batches else (_masked_micro_batch(),)


def _pack(sequences: Sequence[_Sequence]) -> MicroBatch:
    token_ids, labels, masks, advantages, logprobs = [], [], [], [], []
    for sequence in sequences:
        prompt_ids, trajectory = sequence.prompt.token_ids, sequence.trajectory
        joined = np.concatenate((np.array(prompt_ids, np.int64), trajectory.token_ids))
        no_loss = np.zeros(len(prompt_ids) - 1, np.float32)
        token_ids.append(joined[:-1])
        labels.append(joined[1:])
        masks += (no_loss, trajectory.loss_mask)
        advantages += (no_loss, trajectory.loss_mask * np.float32(sequence.advantage))
        logprobs += (no_loss, trajectory.generator_logprobs * trajectory.loss_mask)
    return MicroBatch(
        token_ids=_frozen(np.concatenate(token_ids)),
        labels=_frozen(np.concatenate(labels)),
        lengths=tuple(sequence.num_positions for sequence in sequences),
        loss_mask=_frozen_float(masks),
        advantages=_frozen_float(advantages),
        generator_logprobs=_frozen_float(logprobs),
    )


def _masked_micro_batch() -> MicroBatch:
    zero, one = np.zeros(1, np.float32), np.zeros(1, np.int64)
    return MicroBatch(
        token_ids=one, labels=one, lengths=(1,), loss_mask=zero, advantages=zero, generator_logprobs=zero
    )


def _frozen_float(pieces: Sequence[FloatArray]) -> FloatArray:
    joined = np.concatenate(pieces).astype(np.float32, copy=False)
    joined.flags.writeable = False
    return joined


def _frozen(joined: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    joined.flags.writeable = False
    return joined
