"""Records of a run that several tests feed to trackers, console and summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.metrics import StepRecord


def _step_record(**changes: object) -> StepRecord:
    values: dict[str, Any] = {
        "step": 3,
        "version": 4,
        "loss": -0.25,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "entropy": 2.0,
        "clip_fraction": 0.125,
        "ratio_max": 1.25,
        "generator_kl": 0.001,
        "num_tokens": 4096,
        "num_loss_tokens": 2560,
        "skipped": False,
        "reward_mean": 0.5,
        "reward_std": 0.25,
        "accuracy": 0.75,
        "response_length_mean": 5.0,
        "finished_share": 1.0,
        "num_samples": 512,
        "num_failures": 0,
        "num_response_tokens": 2560,
        "staleness": 1,
        "step_s": 0.5,
        "generate_s": 0.4,
        "train_s": 0.45,
        "trainer_wait_s": 0.05,
        "generator_wait_s": 0.1,
        "trainer_idle": 0.1,
        "generator_idle": 0.2,
        "overlap": 0.7,
        "snapshot_ms": 1.0,
        "prepare_ms": 2.0,
        "flip_ms": 4.0,
        "publish_bytes": 500_000,
        "publish_memory_bytes": 1_500_000,
        "peak_memory_bytes": {"trainer_0": 512_000_000, "generator_0": 1_500_000_000},
    }
    values.update(changes)
    return StepRecord(**values)


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    """Makes a full step record (step 3 of a copy run); keyword arguments change fields."""
    return _step_record
