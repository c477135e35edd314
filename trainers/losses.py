"""Losses as pure tensor functions: one value a token in, one value a token out. torch only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainers.types import LossSpec

if TYPE_CHECKING:
    from torch import Tensor


class TokenLoss(NamedTuple):
    """All float32 [N], one entry a trained token; only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor
    generator_kl: Tensor


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    PPO (arXiv 1707.06347), equation 7, negated; the two-sided range is DAPO's (arXiv 2503.14476), equation 10.

    Args:
        logprobs: [N], of the policy that is trained.
        old_logprobs: [N], of the policy that drew the tokens.
        advantages: [N].
        clip_low, clip_high: both >= 0; 0.2 and 0.28 are DAPO's.
    """
    ratio = (logprobs - old_logprobs).exp()
    return -(ratio * advantages).minimum(ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)


def kl_k3(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return (r - 1) - log r per token, an unbiased, never negative estimate of KL(old || new) under old's samples.

    Schulman, "Approximating KL divergence" (2020), estimator k3; DeepSeekMath (arXiv 2402.03300), equation 4.
    """
    log_ratio = logprobs - old_logprobs
    return log_ratio.expm1() - log_ratio


def policy_loss(
    logprobs: Tensor, entropy: Tensor, generator_logprobs: Tensor, advantages: Tensor, spec: LossSpec
) -> TokenLoss:
    """Return GRPO's loss per token: the clipped surrogate minus `entropy_coef` times the entropy.

    DeepSeekMath (arXiv 2402.03300), equation 3 without its KL term, per token; the entropy bonus is PPO's
    (arXiv 1707.06347), equation 9. The caller sums and divides by the batch's number of tokens (DAPO's token mean).

    Args:
        logprobs, entropy: [N], of the policy that is trained, with its gradient.
        generator_logprobs: [N], of the policy that drew the tokens.
        advantages: [N].
        spec: clip range and entropy coefficient.

    Example: logprob -1, generator logprob -1.5, advantage 1: r = 1.65, clipped to 1.28, loss -1.28, no gradient.
    """
    loss = clipped_surrogate(logprobs, generator_logprobs, advantages, clip_low=spec.clip_low, clip_high=spec.clip_high)
    if spec.entropy_coef != 0.0:
        loss = loss - spec.entropy_coef * entropy

    detached = logprobs.detach()
    ratio = (detached - generator_logprobs).exp()
    is_above = (advantages > 0) & (ratio > 1.0 + spec.clip_high)
    is_below = (advantages < 0) & (ratio < 1.0 - spec.clip_low)
    return TokenLoss(loss, ratio, (is_above | is_below).float(), kl_k3(detached, generator_logprobs))
