"""The learning rate as a pure function of the step: nothing to save, nothing to get out of step after a resume."""

from __future__ import annotations

import math

from trainers.types import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Return the learning rate of one step.

    Linear warm-up, then constant, then from `decay_start` on a linear or half-cosine decay (arXiv 1608.03983,
    equation 5, without restarts) down to `lr * min_lr_ratio` at `decay_steps`.

    Args:
        spec: see `OptimizerSpec`.
        step: counted from 0, >= 0.

    Example: lr 1.0, 10 warm-up steps, linear to 0 at 110: step 0 gives 0.1, step 9 gives 1.0, step 60 gives 0.5.
    """
    assert step >= 0, f"step must be >= 0, got {step}"
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps

    start = max(spec.warmup_steps, spec.decay_start)
    if spec.schedule == "constant" or step <= start:
        return spec.lr

    span = spec.decay_steps - start
    progress = min(1.0, (step - start) / span) if span > 0 else 1.0
    share = 1.0 - progress if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * share)
