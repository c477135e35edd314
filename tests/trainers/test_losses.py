"""Losses against a second, plain float64 version of each formula."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.losses import clipped_surrogate, kl_k3, policy_loss
from trainers.types import LossSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOGPROB = st.floats(-12, 0, width=32)
_TOKENS = st.lists(st.tuples(_LOGPROB, _LOGPROB, st.floats(-4, 4, width=32), st.floats(0, 5, width=32)), min_size=1)
_CLIP = st.floats(0.05, 0.9)


def _columns(tokens: Sequence[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(column) for column in zip(*tokens, strict=True)]


@given(_TOKENS, _CLIP, _CLIP, st.floats(0, 0.5))
def test_policy_loss_equals_the_reference(
    tokens: list[tuple[float, float, float, float]], low: float, high: float, entropy_coef: float
) -> None:
    logprobs, generator_logprobs, advantages, entropy = _columns(tokens)
    spec = LossSpec(clip_low=low, clip_high=high, entropy_coef=entropy_coef)
    found = policy_loss(logprobs, entropy, generator_logprobs, advantages, spec)
    for index, (new, old, advantage, nats) in enumerate(tokens):
        ratio = math.exp(new - old)
        clipped = min(max(ratio, 1 - low), 1 + high)
        loss = -min(ratio * advantage, clipped * advantage) - entropy_coef * nats
        assert found.loss[index].item() == pytest.approx(loss, rel=1e-4, abs=1e-5)
        assert found.ratio[index].item() == pytest.approx(ratio, rel=1e-5)
        assert found.generator_kl[index].item() == pytest.approx(ratio - 1 - (new - old), rel=1e-4, abs=1e-5)
        if abs(ratio - (1 + high)) > 1e-5 and abs(ratio - (1 - low)) > 1e-5:
            is_clipped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
            assert found.is_clipped[index].item() == is_clipped


@given(_TOKENS)
def test_kl_k3_is_never_negative(tokens: list[tuple[float, float, float, float]]) -> None:
    logprobs, old_logprobs, _, _ = _columns(tokens)
    assert (kl_k3(logprobs, old_logprobs) >= 0).all()


def test_kl_k3_estimates_the_divergence() -> None:
    """Its mean under the old policy is KL(old || new)."""
    old, new = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    expected = (old.exp() * (old - new)).sum()
    assert (old.exp() * kl_k3(new, old)).sum().item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "has_gradient"),
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False), (0.1, 1.0, True), (0.1, -1.0, True)],
)
def test_gradient_stops_where_the_clip_is_active(log_ratio: float, advantage: float, has_gradient: bool) -> None:
    logprobs = torch.tensor([-1.0 + log_ratio], requires_grad=True)
    loss = clipped_surrogate(
        logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28
    ).sum()
    loss.backward()
    assert logprobs.grad is not None
    wanted = -math.exp(log_ratio) * advantage if has_gradient else 0.0
    assert logprobs.grad.item() == pytest.approx(wanted, rel=1e-5)


def test_only_the_loss_carries_a_gradient() -> None:
    logprobs, entropy = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    found = policy_loss(logprobs, entropy, torch.zeros(2), torch.ones(2), LossSpec(entropy_coef=0.1))
    assert found.loss.requires_grad
    assert not any(column.requires_grad for column in found[1:])
    found.loss.sum().backward()
    assert entropy.grad is not None
    assert torch.equal(entropy.grad, torch.full((2,), -0.1))
