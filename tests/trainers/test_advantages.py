"""Group-relative advantages against statistics from the standard library."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.advantages import group_relative

_REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@given(_REWARDS, st.booleans())
def test_group_relative_equals_the_reference(rewards: list[float], normalize_std: bool) -> None:
    found = group_relative(np.array(rewards), normalize_std=normalize_std)
    mean = statistics.fmean(rewards)
    scale = statistics.stdev(rewards) + 1e-4 if normalize_std else 1.0
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [(reward - mean) / scale for reward in rewards], rtol=1e-5, atol=1e-5)


@given(st.floats(-1e6, 1e6), st.integers(0, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, size: int, normalize_std: bool) -> None:
    """Also where the mean of equal floats is not that float, for instance nine times 0.1."""
    found = group_relative(np.full(size, reward), normalize_std=normalize_std)
    assert found.shape == (size,)
    assert (found == 0.0).all()


@given(_REWARDS)
def test_advantages_of_a_group_cancel(rewards: list[float]) -> None:
    assert abs(float(group_relative(np.array(rewards), normalize_std=True).sum())) < 1e-3


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        group_relative(np.array([1.0, np.nan]), normalize_std=True)
