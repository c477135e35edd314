"""Fingerprints: equal for equal runs, different for any bit of difference, and right after a resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.fingerprints import Fingerprints, batch_digest, weights_digest
from asyncrl.line_file import read_lines
from asyncrl.scheduler import Scored, StepOutcome
from asyncrl.tracker import TrackingError
from asyncrl.wave import PublishReport, Wave
from engine.types import WeightVersion
from trainers.types import Batch, MicroBatch, StepResult

COLUMNS = ("token_ids", "labels", "loss_mask", "advantages", "generator_logprobs")
FIRST = {0: "f" * 32, 1: "e" * 32}


def micro_batch(num_positions: int = 3, *, start: int = 0) -> MicroBatch:
    numbers = np.arange(start, start + num_positions)
    floats = numbers.astype(np.float32)
    return MicroBatch(
        token_ids=numbers, labels=numbers + 1, lengths=(num_positions,), loss_mask=np.ones(num_positions, np.float32),
        advantages=floats / 2, generator_logprobs=-floats,
    )  # fmt: skip


def batch(*ranks: tuple[MicroBatch, ...], step: int = 3) -> Batch:
    return Batch(step=step, micro_batches=ranks, num_loss_tokens=9, oldest_version=WeightVersion(2))


BATCH = batch((micro_batch(), micro_batch(2, start=5)), (micro_batch(4, start=9),))


def test_equal_batches_have_equal_digests_of_32_hex_digits() -> None:
    same = batch((micro_batch(), micro_batch(2, start=5)), (micro_batch(4, start=9),))
    assert batch_digest(BATCH) == batch_digest(same)
    assert len(batch_digest(BATCH)) == 32
    assert int(batch_digest(BATCH), 16) >= 0


@given(rank=st.integers(0, 1), name=st.sampled_from(COLUMNS), byte=st.integers(0, 7), bit=st.integers(0, 7))
def test_any_bit_of_a_column_changes_the_digest(rank: int, name: str, byte: int, bit: int) -> None:
    micro = BATCH.micro_batches[rank][0]
    flipped = getattr(micro, name).copy()
    flipped.view(np.uint8)[byte] ^= 1 << bit
    changed = replace(micro, **{name: flipped})
    ranks = list(BATCH.micro_batches)
    ranks[rank] = (changed, *ranks[rank][1:])
    assert batch_digest(replace(BATCH, micro_batches=tuple(ranks))) != batch_digest(BATCH)


def test_whatever_else_a_gradient_depends_on_changes_the_digest() -> None:
    (a, b), (c,) = BATCH.micro_batches
    others = [
        replace(BATCH, step=4),
        replace(BATCH, num_loss_tokens=10),
        replace(BATCH, oldest_version=None),
        replace(BATCH, oldest_version=WeightVersion(3)),
        replace(BATCH, micro_batches=((b, a), (c,))),
        replace(BATCH, micro_batches=((a,), (b, c))),
        replace(BATCH, micro_batches=((a, b, c),)),
        replace(BATCH, micro_batches=((c,), (a, b))),
        replace(BATCH, micro_batches=((replace(a, lengths=(1, 2)), b), (c,))),
        replace(BATCH, micro_batches=((replace(a, lengths=(2, 1)), b), (c,))),
    ]
    assert len({batch_digest(each) for each in (BATCH, *others)}) == len(others) + 1


def test_a_cut_at_another_place_changes_the_digest() -> None:
    """Same positions in the same order, one micro-batch or two."""
    whole, left, right = micro_batch(4), micro_batch(2), micro_batch(2, start=2)
    assert batch_digest(batch((left, right))) != batch_digest(batch((replace(whole, lengths=(2, 2)),)))


def test_weights_are_digested_in_the_order_of_buckets() -> None:
    assert weights_digest({0: "a" * 32, 1: "b" * 32}) == weights_digest({1: "b" * 32, 0: "a" * 32})
    assert weights_digest({0: "a" * 32, 1: "b" * 32}) != weights_digest({0: "b" * 32, 1: "a" * 32})
    assert weights_digest({2: "a" * 32, 10: "b" * 32}) != weights_digest({2: "b" * 32, 10: "a" * 32})


def outcome(step: int, *, skipped: bool = False, **changes: Any) -> StepOutcome:  # noqa: ANN401
    version = WeightVersion(max(0, step - 1))
    wave = Wave(
        step=step, version=version, prompts=(), results=(), started_s=0.0, ended_s=1.0,
        publish=PublishReport(version=version, prepare_ms=0.0, flip_ms=0.0, flips=()),
    )  # fmt: skip
    result = StepResult.skip(step)
    if not skipped:
        digests = {0: f"{step:032x}", 1: f"{step + 1:032x}"}
        result = replace(result, skipped=False, digests=digests, loss=-0.1 * step, grad_norm=0.3, **changes)
    return StepOutcome(
        scored=Scored(wave=wave, groups=(), batch=replace(BATCH, step=step)),
        result=result, staleness=1, started_s=0.0, ended_s=1.0,
    )  # fmt: skip


def write(
    folder: Path, *outcomes: StepOutcome, resume_step: int | None = None, first: Mapping[int, str] = FIRST
) -> list[dict[str, Any]]:
    fingerprints = Fingerprints(folder, resume_step=resume_step)
    try:
        fingerprints.open(first)
        for each in outcomes:
            fingerprints.step(each)
    finally:
        fingerprints.close()
    return list(read_lines(folder / "fingerprints.jsonl"))


def test_a_line_says_which_step_and_holds_floats_to_the_bit(tmp_path: Path) -> None:
    (line,) = write(tmp_path, outcome(3))
    assert list(line) == ["step", "version", "batch", "loss", "grad_norm", "weights"]
    assert (line["step"], line["version"]) == (3, 2)
    assert float.fromhex(line["loss"]) == -0.1 * 3
    assert float.fromhex(line["grad_norm"]) == 0.3
    assert line["batch"] == batch_digest(replace(BATCH, step=3))
    assert line["weights"] == weights_digest({0: f"{3:032x}", 1: f"{4:032x}"})
    assert json.loads((tmp_path / "fingerprints.jsonl").read_text()) == line


def test_a_skipped_step_has_the_weights_of_the_version_before(tmp_path: Path) -> None:
    lines = write(tmp_path, outcome(0, skipped=True), outcome(1), outcome(2, skipped=True), outcome(3))
    weights = [line["weights"] for line in lines]
    assert weights[0] == weights_digest(FIRST)
    assert weights[2] == weights[1] != weights[0]
    assert weights[3] != weights[2]


@pytest.mark.parametrize("skipped", [(), (2,), (1, 2, 3)])
def test_same_seeds_same_bits(tmp_path: Path, skipped: tuple[int, ...]) -> None:
    """A run that is resumed at step 2 ends with the lines of one that was never interrupted, to the byte."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    steps = [outcome(step, skipped=step in skipped) for step in range(5)]
    whole = write(tmp_path / "whole", *steps)
    write(tmp_path / "resumed", *steps[:4])  # killed after step 3; the checkpoint is of version 2
    digests = [FIRST, *(step.result.digests for step in steps)]
    version_2 = next(made for made in reversed(digests[:3]) if made)  # a skipped step makes the same bits
    assert write(tmp_path / "resumed", *steps[2:], resume_step=2, first=version_2) == whole
    files = [(tmp_path / name / "fingerprints.jsonl").read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]


def test_a_line_of_no_step_is_named(tmp_path: Path) -> None:
    (tmp_path / "fingerprints.jsonl").write_text('{"loss": "0x0p+0"}\n')
    with pytest.raises(TrackingError, match=r"fingerprints\.jsonl:1 is not a line of a run \('step'\)"):
        write(tmp_path, resume_step=0)


def test_close_may_come_first(tmp_path: Path) -> None:
    Fingerprints(tmp_path, resume_step=None).close()
    assert list(tmp_path.iterdir()) == []
