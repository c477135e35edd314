"""Advantages: how much better a sample was than its group. numpy, float64 inside."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.types import FloatArray

_EPSILON = 1e-4


def group_relative(rewards: npt.NDArray[np.float64], *, normalize_std: bool) -> FloatArray:
    """Return (reward - mean) of one group, over (standard deviation + 1e-4) if asked.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2, "outcome supervision": A_i = (r_i - mean(r)) / std(r). Without the
    division it is Dr. GRPO's (arXiv 2503.20783, section 3.1). The deviation is the sample's (n - 1), as in TRL.

    Args:
        rewards: [n], the samples of one prompt; n may be 0.
        normalize_std: divide by the standard deviation.

    Returns:
        float32 [n]; exactly 0 where all rewards are equal, and for a group of one.

    Raises:
        ValueError: a reward that is not finite.

    Example: rewards [1, 0, 0, 0] give [1.4997, -0.4999, -0.4999, -0.4999], and [0.75, -0.25, -0.25, -0.25] without.
    """
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")

    if rewards.size < 2 or (rewards == rewards[0]).all():  # the mean of equal floats may differ from them in a bit
        return np.zeros(rewards.shape, np.float32)

    advantages: npt.NDArray[np.float64] = rewards - rewards.mean()
    if normalize_std:
        advantages /= rewards.std(ddof=1) + _EPSILON
    return advantages.astype(np.float32)
