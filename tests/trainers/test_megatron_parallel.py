"""DP, TP and PP train like one rank, and a cut of the batch changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from trainers.types import Batch, OptimizerSpec, StepResult

if TYPE_CHECKING:
    from tests.trainers.conftest import Arrays, Batches, StartTrainer

NUM_STEPS = 3
Sizes = dict[str, int]
MakeBatches = Callable[[], "Batches"]


class Trained(NamedTuple):
    """What a few steps gave."""

    results: list[StepResult]
    weights: Arrays


def _spread(batches: Batches, step: int, num_micro_batches: int, dp: int) -> Batch:
    """The same eight uneven sequences whatever the cut: `num_micro_batches` a DP rank."""
    parts = batches.split(batches.micro(9, 1, 14, 3, 3, 20, 7, 12))
    shares = [parts[rank::dp] for rank in range(dp)]
    cut = [[batches.join(share[i::num_micro_batches]) for i in range(num_micro_batches)] for share in shares]
    return batches.batch(step, cut)


def _train(start_trainer: StartTrainer, make_batches: MakeBatches, **fields: object) -> Trained:
    trainer = start_trainer(**fields)
    batches = make_batches()
    results = [trainer.step(_spread(batches, step, 2, trainer.spec.dp)) for step in range(NUM_STEPS)]
    return Trained(results, trainer.canonical(trainer.probe("weights")))  # asserts that all copies are equal


@pytest.fixture
def make_batches(batches: Batches) -> MakeBatches:
    return lambda: type(batches)(seed=5)


@pytest.fixture
def one_rank(start_trainer: StartTrainer, make_batches: MakeBatches) -> Trained:
    return _train(start_trainer, make_batches)


def _assert_same(trained: Trained, expected: Trained) -> None:
    for result, reference in zip(trained.results, expected.results, strict=True):
        for metric in ("loss", "grad_norm", "entropy", "generator_kl", "ratio_max", "clip_fraction"):
            assert getattr(result, metric) == pytest.approx(getattr(reference, metric), rel=1e-5), metric
        assert (result.num_tokens, result.lr, result.version) == (
            reference.num_tokens,
            reference.lr,
            reference.version,
        )
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(trained.weights[name], weight, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_parallel_ranks_train_like_one(
    start_trainer: StartTrainer, make_batches: MakeBatches, one_rank: Trained, sizes: Sizes
) -> None:
    assert one_rank.results[0].grad_norm > 0.5, "the gradient must be clipped, or clipping is not tested"
    _assert_same(_train(start_trainer, make_batches, **sizes), one_rank)


def test_untied_pipeline_trains_like_one_rank(
    start_trainer: StartTrainer, make_batches: MakeBatches, untied_model: Path
) -> None:
    expected = _train(start_trainer, make_batches, model_dir=str(untied_model))
    _assert_same(_train(start_trainer, make_batches, model_dir=str(untied_model), pp=2), expected)


def test_plain_optimizer_trains_like_the_distributed_one(
    start_trainer: StartTrainer, make_batches: MakeBatches, one_rank: Trained
) -> None:
    optimizer = OptimizerSpec(lr=1e-2, weight_decay=0.1, clip_grad=0.5, warmup_steps=2, distributed=False)
    _assert_same(_train(start_trainer, make_batches, dp=2, optimizer=optimizer), one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_combined_parallel_ranks_train_like_one(
    start_trainer: StartTrainer, make_batches: MakeBatches, one_rank: Trained, sizes: Sizes
) -> None:
    _assert_same(_train(start_trainer, make_batches, **sizes), one_rank)


@pytest.mark.parametrize("dp", [1, 2])
def test_split_free_loss(start_trainer: StartTrainer, batches: Batches, dp: int) -> None:
    """Invariant: the gradient does not depend on how a batch is cut into micro-batches or DP ranks."""
    optimizer = OptimizerSpec(lr=1e-2, distributed=False)  # so that every rank sees the whole gradient
    parts = batches.split(batches.micro(1, 3, 9, 27))
    num_loss_tokens = 50

    whole = start_trainer(optimizer=optimizer)
    reference = whole.canonical(whole.probe("forward_backward", (batches.join(parts),), num_loss_tokens))
    trainer = start_trainer(optimizer=optimizer, dp=dp)
    for num_micro_batches in (1, 2, 4) if dp == 1 else (1, 2):
        shares = [parts[rank::dp] for rank in range(dp)]
        own = [
            (tuple(batches.join(share[i::num_micro_batches]) for i in range(num_micro_batches)),) for share in shares
        ]
        gradient = trainer.canonical(trainer.probe("forward_backward", num_loss_tokens, own=own))
        for name, expected in reference.items():
            scale = np.abs(expected).max()
            np.testing.assert_allclose(gradient[name], expected, rtol=0, atol=2e-6 * scale, err_msg=name)


def test_a_rank_without_a_trained_token_takes_part(start_trainer: StartTrainer, batches: Batches) -> None:
    """A DP rank whose share is empty gets one masked position; the result is that of the other rank alone."""
    micro = batches.micro(6, 11)
    masked = replace(batches.micro(1), loss_mask=np.zeros(1, np.float32), advantages=np.zeros(1, np.float32))
    expected = start_trainer().step(batches.batch(0, [[micro]]))
    result = start_trainer(dp=2).step(batches.batch(0, [[micro], [masked]]))
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert result.num_tokens == expected.num_tokens + 1


@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, {"tp": 2}], ids=str)
def test_same_seeds_same_bits(start_trainer: StartTrainer, make_batches: MakeBatches, sizes: Sizes) -> None:
    """Invariant: two runs agree bit for bit, in metrics and weights."""
    first = _train(start_trainer, make_batches, **sizes)
    second = _train(start_trainer, make_batches, **sizes)
    for one, other in zip(first.results, second.results, strict=True):
        assert (one.loss, one.grad_norm, one.entropy) == (other.loss, other.grad_norm, other.entropy)
    for name, weight in first.weights.items():
        np.testing.assert_array_equal(second.weights[name], weight, err_msg=name)


def test_ranks_keep_to_their_cores(start_trainer: StartTrainer) -> None:
    cores = sorted(os.sched_getaffinity(0))
    cpus = ((cores[0],), tuple(cores[-2:]))
    trainer = start_trainer(dp=2, cpus=cpus)
    threads = trainer.probe("threads")
    assert threads == [({(cores[0],)}, 1), ({tuple(cores[-2:])}, len(cpus[1]))]


def test_bfloat16_is_close_to_float32(
    start_trainer: StartTrainer, make_batches: MakeBatches, one_rank: Trained
) -> None:
    results, _ = _train(start_trainer, make_batches, dp=2, dtype="bfloat16")
    assert results[0].loss == pytest.approx(one_rank.results[0].loss, abs=0.02)
    assert results[0].grad_norm == pytest.approx(one_rank.results[0].grad_norm, rel=0.05)
