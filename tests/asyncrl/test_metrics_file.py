"""metrics.jsonl: whole private lines, and what a resume keeps of them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.line_file import read_lines
from asyncrl.metrics import EvalRecord, SampleRow, StepRecord, flatten
from asyncrl.metrics_file import JsonlTracker
from asyncrl.summary import ExitReason, Summary, SummaryBuilder
from asyncrl.tracker import TrackingError

MakeStepRecord = Callable[..., StepRecord]
HOSTILE = "\x1b[2J\nnext \u202e"


def an_end() -> Summary:
    return SummaryBuilder(seed=0).build(exit_reason=ExitReason.FAILED, wall_s=0.0, startup_s=None, idle=None)


def evaluation(version: int) -> EvalRecord:
    return EvalRecord(
        version=version,
        sampled_accuracy=0.5,
        greedy_accuracy=0.5,
        reward_mean=0.5,
        num_prompts=8,
        num_failures=0,
        eval_s=1.0,
    )


def row(step: int) -> SampleRow:
    return SampleRow(
        step=step,
        version=step,
        prompt="copy abc",
        response=HOSTILE,
        answer="abc",
        reward=0.0,
        correct=False,
        finish_reason="stop",
    )


def write_run(folder: Path, step_record: MakeStepRecord, steps: range, resume_step: int | None = None) -> None:
    """Steps with a row of samples each, and an evaluation of every second version."""
    tracker = JsonlTracker(folder, resume_step=resume_step)
    tracker.start()
    for step in steps:
        if step % 2 == 0:
            tracker.evaluation(evaluation(step))
        tracker.step(step_record(step=step, version=step + 1))
        tracker.samples([row(step)])
    tracker.finish(an_end())


def test_lines_are_the_flat_records_and_there_at_once(tmp_path: Path, step_record: MakeStepRecord) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.start()
    tracker.step(step_record())
    tracker.evaluation(evaluation(4))
    try:
        assert list(read_lines(tmp_path / "metrics.jsonl")) == [flatten(step_record()), flatten(evaluation(4))]
    finally:
        tracker.finish(an_end())


def test_files_are_private_whatever_the_umask(tmp_path: Path, step_record: MakeStepRecord) -> None:
    old_mask = os.umask(0)
    try:
        write_run(tmp_path, step_record, range(3))
        write_run(tmp_path, step_record, range(2, 4), resume_step=2)
    finally:
        os.umask(old_mask)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "samples.jsonl"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_samples_stay_one_ascii_line_each_whatever_the_model_wrote(tmp_path: Path, step_record: MakeStepRecord) -> None:
    write_run(tmp_path, step_record, range(1))
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in raw.rstrip(b"\n"))
    assert json.loads(raw)["response"] == HOSTILE


def test_a_resumed_run_ends_with_the_lines_of_one_that_was_never_interrupted(
    tmp_path: Path, step_record: MakeStepRecord
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    write_run(whole, step_record, range(10))
    write_run(resumed, step_record, range(7))  # dies after step 6, its checkpoint is of step 4
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"train/step": 7, "train/lo')  # torn by the kill
    write_run(resumed, step_record, range(4, 10), resume_step=4)

    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_a_resume_from_the_beginning_starts_over(tmp_path: Path, step_record: MakeStepRecord) -> None:
    write_run(tmp_path, step_record, range(3))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write_run(tmp_path, step_record, range(3), resume_step=0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_new_run_never_writes_into_an_old_one(tmp_path: Path, step_record: MakeStepRecord) -> None:
    write_run(tmp_path, step_record, range(1))
    tracker = JsonlTracker(tmp_path)
    with pytest.raises(TrackingError, match=r"metrics\.jsonl is there already: resume that run, or choose another"):
        tracker.start()
    tracker.finish(an_end())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(TrackingError, match="is there already"):
        JsonlTracker(tmp_path).start()
    with pytest.raises(OSError, match="symbolic links"):
        JsonlTracker(tmp_path, resume_step=0).start()
    assert not victim.exists()


def test_a_broken_line_is_named_and_nothing_is_lost(tmp_path: Path, step_record: MakeStepRecord) -> None:
    write_run(tmp_path, step_record, range(2))
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write("{oops\n")
    before = path.read_bytes()
    with pytest.raises(TrackingError, match=r"metrics\.jsonl:4 is not JSON"):
        JsonlTracker(tmp_path, resume_step=1).start()
    assert path.read_bytes() == before
    assert {item.name for item in tmp_path.iterdir()} == {"metrics.jsonl", "samples.jsonl"}
