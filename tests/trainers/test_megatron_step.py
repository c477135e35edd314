"""A step fails loudly before it changes anything, and its snapshot is its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.families import canonical_layout
from engine.plan import make_plan
from engine.receiver import Receiver
from engine.shared_folder import RunSegments
from engine.types import Manifest, WeightVersion
from engine.workers import WorkerError
from trainers.base import NonFiniteLoss

if TYPE_CHECKING:
    from tests.trainers.conftest import Arrays, Batches, StartTrainer


@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_loud_failure_of_a_non_finite_loss(
    start_trainer: StartTrainer, batches: Batches, sizes: dict[str, int]
) -> None:
    """Invariant: it raises on every rank before the optimizer step; the weights are as they were."""
    trainer = start_trainer(**sizes)
    dp = trainer.spec.dp
    trainer.step(batches.batch(0, [[batches.micro(6, 4)] for _ in range(dp)]))
    before = trainer.canonical(trainer.probe("weights"))

    micro = batches.micro(5, 7)
    bad = micro.generator_logprobs.copy()
    bad[np.flatnonzero(micro.loss_mask)[0]] = np.nan
    poisoned = replace(micro, generator_logprobs=bad)
    shares = [(poisoned,)] * trainer.spec.num_ranks
    if dp > 1:
        shares[0] = (batches.micro(6),)  # only one DP rank sees the NaN
    for share, rank in zip(shares, trainer.ranks, strict=True):
        rank.send("step", share, 1, 20, 0, 0)
    for rank in trainer.ranks:
        with pytest.raises(NonFiniteLoss, match=r"step 1: the loss is nan; the weights are as they were"):
            rank.receive()

    after = trainer.canonical(trainer.probe("weights"))
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight, err_msg=name)


def test_loud_failure_of_a_non_finite_gradient(start_trainer: StartTrainer, batches: Batches) -> None:
    """A loss can be finite where its gradient is not: here the gradient's norm overflows."""
    trainer = start_trainer()
    before = trainer.canonical(trainer.probe("weights"))
    micro = batches.micro(5, 7)
    huge = replace(micro, advantages=-np.full_like(micro.advantages, 1e30) * micro.loss_mask)
    with pytest.raises(WorkerError, match=r"NonFiniteLoss: step 0: the gradient norm is inf"):
        trainer.step(batches.batch(0, [[huge]]))
    after = trainer.canonical(trainer.probe("weights"))
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight, err_msg=name)


def test_training_goes_on_after_a_refused_step(start_trainer: StartTrainer, batches: Batches) -> None:
    """Nothing of the refused batch's gradient is left over."""
    good = batches.batch(0, [[batches.micro(6, 9)]])
    expected = start_trainer().step(good)
    trainer = start_trainer()
    micro = batches.micro(5)
    with pytest.raises(WorkerError, match=r"NonFiniteLoss: step 0: the loss is -?inf"):
        trainer.step(batches.batch(0, [[replace(micro, advantages=np.full_like(micro.advantages, np.inf))]]))
    result = trainer.step(good)
    assert (result.loss, result.grad_norm) == (expected.loss, expected.grad_norm)


@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_untorn_snapshot(
    start_trainer: StartTrainer, batches: Batches, tied_model: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Invariant: a version's bytes are those right after its step, whatever happens to the weights later."""
    trainer = start_trainer(**sizes)
    target = canonical_layout(json.loads((tied_model / "config.json").read_text()), dtype="float32")
    plan = make_plan(trainer.layout, target, bucket_bytes=1 << 13)
    live = {name: torch.empty(spec.shape) for name, spec in target.tensors.items()}
    with RunSegments.create("untorn", root=tmp_path) as segments:
        trainer.run("attach", plan, str(segments.folder), 2)
        receiver = Receiver(plan, 0, live, segments.folder, 2)

        def receive(version: int, slot: int, digests: dict[int, str]) -> Arrays:
            number = WeightVersion(version)
            manifest = Manifest(
                epoch=3, version=number, written_version=number, plan_hash=plan.hash, slot=slot, digests=digests
            )
            receiver.prepare(manifest)
            receiver.apply(manifest)
            return {name: tensor.numpy().copy() for name, tensor in live.items()}

        first = trainer.run("snapshot", WeightVersion(0), epoch=3, slot=0)
        initial = trainer.canonical(trainer.probe("weights"))
        batch = batches.batch(0, [[batches.micro(8, 3)] for _ in range(trainer.spec.dp)])
        result = trainer.run("step", batch, epoch=3, slot=1)
        stepped = trainer.canonical(trainer.probe("weights"))
        trainer.probe("poison", "decoder.layers.0.mlp.linear_fc1.weight", 1e6)

        assert (result.version, set(result.digests)) == (1, {bucket.id for bucket in plan.buckets})
        for received, expected in ((receive(0, 0, first), initial), (receive(1, 1, dict(result.digests)), stepped)):
            for name, weight in expected.items():
                np.testing.assert_array_equal(received[name], weight, err_msg=name)
        assert any((initial[name] != stepped[name]).any() for name in initial)
        trainer.run("stop")
