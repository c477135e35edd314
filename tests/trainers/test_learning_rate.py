"""Warm-up and decay at the points where they change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.learning_rate import learning_rate
from trainers.types import OptimizerSpec


def test_warmup_reaches_the_peak_and_stays() -> None:
    spec = OptimizerSpec(lr=2.0, warmup_steps=4)
    assert [learning_rate(spec, step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_no_warmup_starts_at_the_peak() -> None:
    assert learning_rate(OptimizerSpec(lr=2.0), 0) == 2.0


@pytest.mark.parametrize(
    ("schedule", "halfway", "quarter"), [("linear", 0.55, 0.775), ("cosine", 0.55, 0.1 + 0.9 * 0.8535533905932737)]
)
def test_decay(schedule: str, halfway: float, quarter: float) -> None:
    spec = OptimizerSpec(lr=1.0, schedule=schedule, warmup_steps=10, decay_steps=110, min_lr_ratio=0.1)  # type: ignore[arg-type]
    found = [learning_rate(spec, step) for step in (9, 10, 35, 60, 110, 500)]
    assert found == pytest.approx([1.0, 1.0, quarter, halfway, 0.1, 0.1])


def test_the_peak_is_kept_until_the_decay_starts() -> None:
    spec = OptimizerSpec(lr=1.0, schedule="linear", warmup_steps=10, decay_start=70, decay_steps=110, min_lr_ratio=0.1)
    found = [learning_rate(spec, step) for step in (10, 70, 90, 110, 111)]
    assert found == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])


def test_a_decay_without_room_ends_at_the_floor() -> None:
    """A run cut shorter than its warm-up and decay must still have a rate."""
    spec = OptimizerSpec(lr=1.0, schedule="linear", warmup_steps=10, decay_steps=5, min_lr_ratio=0.1)
    assert [learning_rate(spec, step) for step in (4, 10, 11)] == pytest.approx([0.5, 1.0, 0.1])


@given(st.sampled_from(["linear", "cosine"]), st.integers(0, 20), st.integers(21, 200), st.floats(0, 1))
def test_decay_never_rises(schedule: str, warmup: int, stop: int, ratio: float) -> None:
    spec = OptimizerSpec(lr=1.0, schedule=schedule, warmup_steps=warmup, decay_steps=stop, min_lr_ratio=ratio)  # type: ignore[arg-type]
    rates = [learning_rate(spec, step) for step in range(warmup, stop + 5)]
    assert all(later <= earlier for earlier, later in pairwise(rates))
    assert rates[-1] == pytest.approx(ratio)
