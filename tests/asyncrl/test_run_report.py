"""A run's report on itself: written whatever ended the run, and one message for any pile of errors."""

from __future__ import annotations

import io
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import rich.console

from asyncrl.config import load_recipe
from asyncrl.console import Console
from asyncrl.idle import BusyClock
from asyncrl.line_file import read_lines
from asyncrl.machine import Machine
from asyncrl.metrics import EvalRecord, StepRecord
from asyncrl.run_folder import RunFolder
from asyncrl.run_report import TRACEBACK, RunReport, describe_error
from asyncrl.summary import ExitReason
from asyncrl.user_error import UserError
from engine.workers import WorkerDied, WorkerError

COPY = Path(__file__).parents[2] / "configs" / "grpo_copy.yaml"
MakeStepRecord = Callable[..., StepRecord]


class Screen:
    """What a console printed."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.console = Console(
            num_steps=10,
            live=False,
            output=rich.console.Console(file=self.out, width=400),
            errors=rich.console.Console(file=self.err, width=400),
        )


def report(folder: Path, screen: Screen, *, resume_step: int | None = None) -> RunReport:
    loaded = load_recipe(COPY, ["tracking.wandb.mode=disabled", "seed=4"], Machine(cores=(0, 1)))
    return RunReport(loaded, folder, screen.console, resume_step=resume_step, started_s=time.monotonic() - 5.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RunFolder.create(tmp_path / "run", "").close()
    return tmp_path / "run"


def summary(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return loaded


def test_a_run_that_finished(folder: Path, step_record: MakeStepRecord) -> None:
    screen = Screen()
    made = report(folder, screen)
    anyio.run(made.start_tracker)
    now = 100.0
    busy = BusyClock(lambda: now)
    made.measures(busy)
    made.fingerprints.open({0: "f" * 32})
    made.loop_starts()
    with busy.busy("trainer"):
        now += 4.0
    for tell in (made.summary.step, made.tracker.step):
        tell(step_record(step=0, version=1))
    now += 1.0
    made.loop_ended()
    now += 100.0  # the checkpoint of the end does not count
    closed = made.close(ExitReason.FINISHED, None)
    written = summary(folder)
    assert written == json.loads(json.dumps(closed.as_dict()))
    assert (written["exit_reason"], written["error"], written["seed"], written["steps"]) == ("finished", None, 4, 1)
    assert written["trainer_idle"] == pytest.approx(0.2)
    assert written["steps_per_s"] == pytest.approx(0.2)
    assert 5.0 <= written["startup_s"] <= written["wall_s"]
    assert written["peak_memory"]["driver"] > 1 << 20
    assert "finished: 1 steps" in screen.out.getvalue()
    assert not (folder / TRACEBACK).exists()


def test_a_run_that_failed_before_anything_was_there(folder: Path) -> None:
    screen = Screen()
    try:
        raise RuntimeError("no room")
    except RuntimeError as error:
        closed = report(folder, screen).close(ExitReason.FAILED, error)
    assert closed.exit_code == 1
    written = summary(folder)
    assert (written["exit_reason"], written["error"], written["steps"]) == ("failed", "no room", 0)
    assert written["startup_s"] is None
    text = (folder / TRACEBACK).read_text()
    assert text.startswith("Traceback")
    assert text.endswith("RuntimeError: no room\n")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_an_interrupted_run_is_no_failure_and_has_its_rates(folder: Path, step_record: MakeStepRecord) -> None:
    made = report(folder, Screen())
    now = 0.0
    busy = BusyClock(lambda: now)
    made.measures(busy)
    made.loop_starts()
    made.summary.step(step_record(step=0, version=1))
    now = 2.0
    made.loop_ended()
    closed = made.close(ExitReason.INTERRUPTED, KeyboardInterrupt())
    assert (closed.exit_code, closed.error, closed.steps_per_s) == (130, None, 0.5)
    assert not (folder / TRACEBACK).exists()


@pytest.mark.parametrize(
    "broken", ["asyncrl.run_report.write_summary", "asyncrl.run_report.traceback.format_exception"]
)
def test_a_full_disk_keeps_no_tracker_from_finishing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    screen = Screen()
    made = report(folder, screen)
    anyio.run(made.start_tracker)
    made.fingerprints.open({0: "f" * 32})
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(broken, full)
    with pytest.raises(OSError, match="disk full"):
        made.close(ExitReason.FAILED, RuntimeError("first"))
    assert "failed: 0 steps" in screen.out.getvalue()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3, "metrics, samples and fingerprints are closed"


def test_a_resumed_run_speaks_of_the_whole(folder: Path, step_record: MakeStepRecord) -> None:
    def steps(resume_step: int | None, *numbers: int) -> dict[str, Any]:
        made = report(folder, Screen(), resume_step=resume_step)
        anyio.run(made.start_tracker)
        for number in numbers:
            record = step_record(step=number, version=number + 1, reward_mean=float(number), staleness=number % 3)
            for tell in (made.summary.step, made.tracker.step):
                tell(record)
        evaluation = EvalRecord(
            version=numbers[-1] + 1, sampled_accuracy=0.5, greedy_accuracy=None, reward_mean=None, num_prompts=1,
            num_failures=0, eval_s=0.0,
        )  # fmt: skip
        for tell in (made.summary.evaluation, made.tracker.evaluation):
            tell(evaluation)
        made.close(ExitReason.FINISHED, None)
        return summary(folder)

    steps(None, *range(7))
    written = steps(5, *range(5, 12))
    assert (written["steps"], written["resumed_from"]) == (12, 5)
    assert written["reward_start"] == 2.0, "steps 0 to 4, of the process before"
    assert written["reward_end"] == 9.0
    assert written["staleness_max"] == 2
    lines = list(read_lines(folder / "metrics.jsonl"))
    assert [line["train/step"] for line in lines] == [*range(12), 12]


def test_wandb_keeps_one_run_through_a_resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[tuple[str, bool]] = []

    class FakeWandb:
        def __init__(self, *, run_id: str, resume: bool, **_: object) -> None:
            ids.append((run_id, resume))

    monkeypatch.setattr("asyncrl.run_report.WandbTracker", FakeWandb)
    report(folder, Screen())
    RunFolder.reopen(folder).close()
    report(folder, Screen(), resume_step=3)
    assert ids == [((folder / "run_id").read_text(), False), ((folder / "run_id").read_text(), True)]


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("trainer.dp is 3"), "trainer.dp is 3"),
        (ValueError("too many values"), f"ValueError: too many values (see {TRACEBACK} in the run's folder)"),
        (group(group(RuntimeError(" slow \n"))), "slow"),
        (group(WorkerError("trainer_1: peer is gone"), group(WorkerDied("trainer_0 died"))), "trainer_0 died"),
        (group(WorkerError("trainer_1: nan"), OSError("x")), "trainer_1: nan"),
        (OSError(28, "No space left"), f"OSError: [Errno 28] No space left (see {TRACEBACK} in the run's folder)"),
        (KeyError("step"), f"KeyError: 'step' (see {TRACEBACK} in the run's folder)"),
        (UserError(), f"UserError (see {TRACEBACK} in the run's folder)"),
    ],
)
def test_one_message(error: Exception, message: str) -> None:
    assert describe_error(error) == message
