"""What crosses the trainer's border: frozen, without torch, and what an empty batch and a skipped step are."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

from trainers import types
from trainers.types import Batch, LossSpec, MicroBatch, OptimizerSpec, StepResult, TrainerSpec


def micro_batch(*mask: float) -> MicroBatch:
    length = len(mask)
    return MicroBatch(
        token_ids=np.zeros(length, np.int64),
        labels=np.zeros(length, np.int64),
        lengths=(length,),
        loss_mask=np.array(mask, np.float32),
        advantages=np.zeros(length, np.float32),
        generator_logprobs=np.zeros(length, np.float32),
    )


def batch(*ranks: tuple[MicroBatch, ...]) -> Batch:
    return Batch(step=0, micro_batches=ranks, num_loss_tokens=5, oldest_version=None)


SPEC = TrainerSpec(model_dir="m", tp=2, pp=3, dp=5, optimizer=OptimizerSpec(lr=1.0), loss=LossSpec(), seed=0)


def test_a_batch_is_empty_if_no_rank_has_a_trained_token() -> None:
    masked, trained = micro_batch(0, 0), micro_batch(0, 1)
    assert batch((masked,), (masked, masked)).is_empty
    assert not batch((masked,), (masked, trained)).is_empty
    assert not batch((trained,), (masked,)).is_empty


def test_tokens_of_the_denominator_alone_are_no_gradient() -> None:
    assert batch((micro_batch(0),)).num_loss_tokens > 0
    assert batch((micro_batch(0),)).is_empty


@pytest.mark.parametrize("step", [0, 7])
def test_every_step_makes_a_version(step: int) -> None:
    """A skipped one too: of the same bits, hence without digests of its own."""
    skipped = StepResult.skip(step)
    assert (skipped.step, skipped.version, skipped.skipped) == (step, step + 1, True)
    assert dict(skipped.digests) == {}
    assert (skipped.loss, skipped.grad_norm, skipped.lr, skipped.num_tokens, skipped.ratio_max) == (0, 0, 0, 0, 1)


def test_ranks_of_all_kinds() -> None:
    assert SPEC.num_ranks == 30


def test_one_way_data() -> None:
    made = [micro_batch(1), batch(), StepResult.skip(0), SPEC, SPEC.optimizer, SPEC.loss]
    for each in made:
        for item in dataclasses.fields(each):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(each, item.name, None)
    declared = [each for each in vars(types).values() if dataclasses.is_dataclass(each)]
    assert all(each.__dataclass_params__.frozen for each in declared)  # type: ignore[attr-defined]


def test_a_batch_arrives_on_the_other_side_as_it_was() -> None:
    """Ray pickles it."""
    sent = batch((micro_batch(0, 1), micro_batch(1)), (micro_batch(0),))
    (rank, other), arrived = sent.micro_batches, pickle.loads(pickle.dumps(sent))  # noqa: S301 - our own bytes
    assert [micro.lengths for micro in arrived.micro_batches[0]] == [micro.lengths for micro in rank]
    assert arrived.micro_batches[0][0].loss_mask.tolist() == rank[0].loss_mask.tolist()
    assert len(arrived.micro_batches[1]) == len(other)
    assert arrived.is_empty is False


def test_the_driver_needs_no_torch_for_them() -> None:
    code = "import sys, trainers.types, trainers.base; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
