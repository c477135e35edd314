"""The summary of a run: what is measured over what, partial runs, the atomic file."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.idle import IdleShares
from asyncrl.metrics import EvalRecord, StepRecord, flatten
from asyncrl.summary import ExitReason, Summary, SummaryBuilder, library_versions, write_summary

KEYS_THAT_SCRIPTS_READ = (
    *("steps", "seed", "reward_start", "reward_end", "eval_sampled", "eval_greedy", "tokens_per_s", "wall_s"),
    *("startup_s", "steps_per_s", "trainer_idle", "generator_idle", "staleness_max", "publish_ms", "peak_memory"),
    "exit_reason",
)


@pytest.fixture
def record(step_record: Callable[..., StepRecord]) -> Callable[..., StepRecord]:
    """Step n with reward n / 10 and 100 response tokens, without anything about its publish."""

    def make(step: int, **changes: object) -> StepRecord:
        quiet = dict.fromkeys(("snapshot_ms", "prepare_ms", "flip_ms", "publish_bytes", "publish_memory_bytes"))
        values = {"version": step + 1, "reward_mean": step / 10, "num_response_tokens": 100, "peak_memory_bytes": {}}
        return step_record(**(quiet | values | {"step": step} | changes))

    return make


def evaluation(version: int, sampled: float | None, greedy: float | None) -> EvalRecord:
    return EvalRecord(
        version=version,
        sampled_accuracy=sampled,
        greedy_accuracy=greedy,
        reward_mean=None,
        num_prompts=8,
        num_failures=0,
        eval_s=1.0,
    )


IDLE = IdleShares(wall_s=20.0, trainer_busy_s=18.0, generator_busy_s=15.0, overlap_s=14.0)


@pytest.fixture
def finished_run(record: Callable[..., StepRecord]) -> Summary:
    builder = SummaryBuilder(seed=7)
    for step in range(20):
        builder.step(
            record(
                step,
                staleness=0 if step == 0 else 1,
                flip_ms=float(step),
                publish_bytes=500_000,
                publish_memory_bytes=1_500_000,
                peak_memory_bytes={"trainer_0": 1000 - step, "generator_0": step},
            )
        )
    builder.evaluation(evaluation(10, 0.5, 0.6))
    builder.evaluation(evaluation(20, 0.9, None))
    builder.memory({"driver": 5})
    return builder.build(exit_reason=ExitReason.FINISHED, wall_s=31.0, startup_s=9.0, idle=IDLE)


def test_a_finished_run(finished_run: Summary) -> None:
    summary = finished_run
    assert summary.steps == 20
    assert summary.reward_start == pytest.approx((0 + 0.1 + 0.2 + 0.3 + 0.4) / 5)
    assert summary.reward_end == pytest.approx((1.5 + 1.6 + 1.7 + 1.8 + 1.9) / 5)
    assert (summary.eval_sampled, summary.eval_greedy) == (0.9, 0.6)
    assert summary.tokens_per_s == 2000 / 20
    assert summary.steps_per_s == 1.0
    assert summary.trainer_idle == pytest.approx(0.1)
    assert summary.generator_idle == pytest.approx(0.25)
    assert summary.overlap == pytest.approx(0.7)
    assert summary.staleness_max == 1
    assert summary.publish_ms == 9.5
    assert summary.peak_memory == {"trainer_0": 1000, "generator_0": 19, "driver": 5}
    assert summary.exit_code == 0


def test_the_closing_line_shows_what_matters(finished_run: Summary) -> None:
    assert finished_run.closing_line() == (
        "finished: 20 steps in 31.0 s (start-up 9.0 s), reward 0.200 -> 1.700, "
        "held-out accuracy 0.900 sampled 0.600 greedy, 100 tokens/s, overlap 70% (idle: trainer 10%, generator 25%), "
        "publish 9.5 ms, 0.5 MB moved, 1.5 MB held"
    )


@pytest.mark.parametrize(("reason", "code"), [(ExitReason.INTERRUPTED, 130), (ExitReason.FAILED, 1)])
def test_a_run_that_never_started_has_nulls_and_a_failing_exit_code(reason: ExitReason, code: int) -> None:
    summary = SummaryBuilder(seed=0).build(exit_reason=reason, wall_s=2.0, startup_s=None, idle=None, error="why")
    values = summary.as_dict()
    assert values["exit_reason"] == str(reason)
    assert summary.exit_code == code
    assert values["steps"] == 0
    assert [key for key in KEYS_THAT_SCRIPTS_READ if values[key] is None] == [
        *("reward_start", "reward_end", "eval_sampled", "eval_greedy", "tokens_per_s", "startup_s", "steps_per_s"),
        *("trainer_idle", "generator_idle", "staleness_max", "publish_ms"),
    ]
    assert "reward - -> -" in summary.closing_line()


def test_steps_without_samples_have_no_say_in_the_rewards(record: Callable[..., StepRecord]) -> None:
    builder = SummaryBuilder(seed=0)
    builder.step(record(0, reward_mean=None, staleness=None))
    builder.step(record(1, reward_mean=0.5, staleness=0))
    summary = builder.build(exit_reason=ExitReason.FINISHED, wall_s=1.0, startup_s=0.5, idle=None)
    assert (summary.reward_start, summary.reward_end, summary.staleness_max, summary.steps) == (0.5, 0.5, 0, 2)


def test_a_resumed_run_speaks_of_the_whole_run(record: Callable[..., StepRecord]) -> None:
    builder = SummaryBuilder(seed=0, resumed_from=20)
    lines = [flatten(record(step, staleness=2)) for step in range(20)]
    builder.restore([*lines, flatten(evaluation(20, 0.4, 0.5))])
    before = builder.build(exit_reason=ExitReason.FAILED, wall_s=1.0, startup_s=None, idle=None)
    assert (before.steps, before.eval_sampled, before.resumed_from) == (20, 0.4, 20)

    builder.step(record(20, reward_mean=10.0))
    after = builder.build(exit_reason=ExitReason.FINISHED, wall_s=30.0, startup_s=9.0, idle=IDLE)
    assert after.steps == 21
    assert after.reward_start == pytest.approx(0.2)
    assert after.reward_end == pytest.approx((1.6 + 1.7 + 1.8 + 1.9 + 10) / 5)
    assert after.staleness_max == 2
    assert after.steps_per_s == 1 / 20


def test_summary_json_has_the_keys_that_scripts_read_and_is_private(tmp_path: Path, finished_run: Summary) -> None:
    old_mask = os.umask(0)
    try:
        path = write_summary(finished_run, tmp_path)
    finally:
        os.umask(old_mask)
    values = json.loads(path.read_text())
    assert path.name == "summary.json"
    assert set(KEYS_THAT_SCRIPTS_READ) <= set(values)
    assert values == finished_run.as_dict()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_summary_that_cannot_be_written_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished_run: Summary
) -> None:
    path = write_summary(finished_run, tmp_path)
    before = path.read_text()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_summary(
            SummaryBuilder(seed=1).build(exit_reason=ExitReason.FAILED, wall_s=0, startup_s=None, idle=None), tmp_path
        )
    assert path.read_text() == before
    assert [item.name for item in tmp_path.iterdir()] == ["summary.json"]


def test_library_versions_name_what_decides_the_numbers() -> None:
    versions = library_versions()
    assert {"ray", "transformers", "wandb", "numpy"} <= set(versions)
    assert all(version[0].isdigit() for version in versions.values())
