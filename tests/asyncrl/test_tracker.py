"""wandb, the real library: what it stores, that it is quiet, cheap, loud when broken, and leaves nothing behind."""

from __future__ import annotations

import gc
import http.server
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from asyncrl.line_file import read_lines
from asyncrl.metrics import STEP_AXIS, EvalRecord, SampleRow, StepRecord, flatten
from asyncrl.metrics_file import JsonlTracker
from asyncrl.summary import ExitReason, Summary, SummaryBuilder
from asyncrl.tracker import FanoutTracker, Tracker, TrackingError, WandbMode, WandbTracker

MakeStepRecord = Callable[..., StepRecord]

EVALUATION = EvalRecord(
    version=4, sampled_accuracy=0.5, greedy_accuracy=0.75, reward_mean=0.5, num_prompts=8, num_failures=0, eval_s=1.0
)
ROW = SampleRow(
    step=3,
    version=3,
    prompt="copy abc",
    response="abc\x1b[2J",
    answer="abc",
    reward=1.0,
    correct=None,
    finish_reason="stop",
)


def an_end(reason: ExitReason = ExitReason.FINISHED) -> Summary:
    return SummaryBuilder(seed=0).build(exit_reason=reason, wall_s=1.5, startup_s=None, idle=None)


def stored_records(run_folder: Path) -> Iterator[Any]:
    """Yield the protobuf records of an offline run: a LevelDB log (32 KiB blocks, 7-byte chunk headers)."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # made at run time, unknown to mypy
    (path,) = run_folder.glob("wandb/offline-run-*/run-*.wandb")
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # no room for a header: the rest of the block is padding
            position += 32768 - position % 32768
            continue

        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            yield messages.Record.FromString(parts)
            parts = b""


def stored_history(run_folder: Path) -> list[dict[str, Any]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in stored_records(run_folder)
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.fixture(autouse=True)
def _no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no settings and an empty home, whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("NETRC", raising=False)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., WandbTracker]:
    folder = tmp_path / "run-0"
    folder.mkdir()
    return partial(WandbTracker, folder=folder, project="asyncrl-tests", run_id="abc123", config={"seed": 7})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run-0"


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]


def test_an_offline_run_stores_everything_in_its_folder_and_says_nothing(
    make: Callable[..., WandbTracker],
    folder: Path,
    tmp_path: Path,
    step_record: MakeStepRecord,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tracker = make(mode="offline", tags=("copy",), group="seeds")
    line = tracker.start()
    assert line.startswith("wandb: offline; upload later with `wandb sync ")
    assert len(children()) == 1
    tracker.step(step_record())
    tracker.evaluation(EVALUATION)
    tracker.samples([ROW, ROW])
    tracker.finish(an_end())

    assert capfd.readouterr() == ("", "")
    assert children() == []
    assert list((tmp_path / "home").iterdir()) == []
    assert {path.name for path in folder.iterdir()} == {"wandb"}
    assert not [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_SERVICE"]

    (core_log,) = folder.glob("wandb/cache/wandb/logs/*.log")
    assert '"disable-analytics":true' in core_log.read_text()  # otherwise it looks up a telemetry server, offline too

    step, evaluation, samples = stored_history(folder)
    assert flatten(step_record()).items() <= step.items()
    assert flatten(EVALUATION).items() <= evaluation.items()
    assert samples[STEP_AXIS] == 3
    assert (samples["samples/rollouts/_type"], samples["samples/rollouts/nrows"]) == ("table-file", 2)
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/samples/*.table.json")
    stored = json.loads(table.read_text())
    assert stored["columns"] == [
        *("step", "version", "prompt", "response", "answer"),
        *("reward", "correct"),
        "finish_reason",
    ]
    assert stored["data"][0] == [3, 3, "copy abc", r"abc\x1b[2J", "abc", 1.0, None, "stop"]


def test_the_step_is_a_metric_of_its_own_and_every_groups_axis(
    make: Callable[..., WandbTracker], folder: Path, step_record: MakeStepRecord
) -> None:
    tracker = make(mode="offline")
    tracker.start()
    tracker.step(step_record(step=17))
    tracker.finish(an_end())

    records = list(stored_records(folder))
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    names = {metric.name: metric.step_metric for metric in metrics if metric.name}
    globs = {metric.glob_name: metric.step_metric for metric in metrics if metric.glob_name}
    assert names == {STEP_AXIS: ""}
    assert globs == {
        f"{group}/*": STEP_AXIS for group in ("train", "rollout", "schedule", "publish", "memory", "eval", "samples")
    }
    (history,) = stored_history(folder)
    assert (history[STEP_AXIS], history["_step"]) == (17, 0)


def test_config_summary_and_exit_code_are_stored(make: Callable[..., WandbTracker], folder: Path) -> None:
    tracker = make(mode="offline", config={"seed": 7, "model": {"path": "${oc.env:SECRET}"}})
    tracker.start()
    tracker.finish(an_end(ExitReason.FAILED))

    by_type: dict[str, list[Any]] = {}
    for record in stored_records(folder):
        by_type.setdefault(record.WhichOneof("record_type"), []).append(record)
    config = {item.key: json.loads(item.value_json) for item in by_type["run"][0].run.config.update}
    assert config["seed"] == 7
    assert config["model"] == {"path": "${oc.env:SECRET}"}
    assert by_type["run"][0].run.run_id == "abc123"
    assert by_type["run"][0].run.display_name == folder.name
    summary = {item.key: json.loads(item.value_json) for record in by_type["summary"] for item in record.summary.update}
    assert summary["summary/exit_reason"] == "failed"
    assert summary["summary/wall_s"] == 1.5
    assert by_type["exit"][0].exit.exit_code == 1
    assert not list(folder.glob("wandb/*/files/wandb-metadata.json"))  # would hold the command line and the host


def test_disabled_does_nothing_at_all(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from asyncrl.tracker import WandbTracker\n"
        f"tracker = WandbTracker(folder=Path({str(folder)!r}), mode='disabled', project='p', run_id='r', config={{}})\n"
        "assert tracker.start() == ''; tracker.samples([]); assert 'wandb' not in sys.modules"
    )
    folder.mkdir()
    subprocess.run([sys.executable, "-P", "-c", program], check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert list(folder.iterdir()) == []


def test_disabled_takes_records(make: Callable[..., WandbTracker], folder: Path, step_record: MakeStepRecord) -> None:
    tracker = make(mode="disabled")
    assert tracker.start() == ""
    tracker.step(step_record())
    tracker.evaluation(EVALUATION)
    tracker.samples([ROW])
    tracker.finish(an_end())
    assert list(folder.iterdir()) == []


def test_auto_is_offline_without_a_key_and_obeys_wandbs_own_variable(
    make: Callable[..., WandbTracker], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = make(mode="auto")
    assert "offline" in tracker.start()
    tracker.finish(an_end())

    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = make(mode="auto")
    assert tracker.start() == ""
    tracker.finish(an_end())

    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(
        TrackingError, match="WANDB_MODE must be one of auto, online, offline, disabled, got 'sometimes'"
    ):
        make(mode="auto").start()


def test_a_bad_mode_is_refused_at_once(make: Callable[..., WandbTracker]) -> None:
    with pytest.raises(ValueError, match=r"tracking\.wandb\.mode must be one of .*, got 'sometimes'"):
        make(mode="sometimes")


class _Server(http.server.BaseHTTPRequestHandler):
    """A wandb server that knows no key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b'{"errors": [{"message": "user is not logged in"}]}')

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def refusing_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("WANDB_BASE_URL", url)
        yield url
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("refusing_server")
@pytest.mark.parametrize(
    ("mode", "key", "message"),
    [
        ("auto", "a" * 40, "user is not logged in"),
        ("online", "a" * 40, "user is not logged in"),
        ("auto", "short", r"must have 40\+ characters, has 5"),
        ("online", None, "no API key is configured for http://127.0.0.1"),
    ],
)
def test_a_key_that_cannot_work_is_one_clear_error_at_the_start(
    make: Callable[..., WandbTracker],
    mode: WandbMode,
    key: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    tracker = make(mode=mode)
    with pytest.raises(TrackingError, match=rf"did not start: .*{message}.*`wandb login`.*tracking\.wandb\.mode"):
        tracker.start()
    tracker.finish(an_end(ExitReason.FAILED))
    assert children() == []
    assert capfd.readouterr() == ("", "")


def test_a_record_costs_less_than_a_millisecond_of_the_drivers_cpu(
    make: Callable[..., WandbTracker], folder: Path, step_record: MakeStepRecord
) -> None:
    tracker = FanoutTracker([JsonlTracker(folder), make(mode="offline")])
    tracker.start()
    record = step_record()
    batches_ms = []
    for _ in range(8):
        before_s = time.process_time()
        for _ in range(25):
            tracker.step(record)
        batches_ms.append((time.process_time() - before_s) / 25 * 1000)
    tracker.finish(an_end())
    print(f"CPU of one record: {min(batches_ms):.3f} ms")
    assert min(batches_ms) < 1.0  # the least disturbed batch: other programs' noise is not ours


def test_starts_beside_other_work_in_a_thread(make: Callable[..., WandbTracker], step_record: MakeStepRecord) -> None:
    async def main() -> None:
        tracker = make(mode="offline")
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await anyio.sleep(0.01)
                ticks += 1

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            line = await anyio.to_thread.run_sync(tracker.start)
            group.cancel_scope.cancel()
        assert "offline" in line
        assert ticks > 3
        tracker.step(step_record())
        tracker.finish(an_end())

    anyio.run(main)
    assert children() == []


def test_a_resumed_run_is_the_same_wandb_run(
    make: Callable[..., WandbTracker], folder: Path, step_record: MakeStepRecord
) -> None:
    for resume in (False, True):
        tracker = make(mode="offline", resume=resume)
        tracker.start()
        tracker.step(step_record(step=int(resume)))
        tracker.finish(an_end(ExitReason.FINISHED if resume else ExitReason.INTERRUPTED))
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2  # `wandb sync` joins them by their id
    assert len(list(folder.glob("wandb/offline-run-*/run-abc123.wandb"))) == 2


@pytest.fixture
def _wandb_forgets_its_process() -> Iterator[None]:
    """wandb does not wait for its process when the connection is gone; let its handle complain here and not later."""
    yield
    gc.collect()


@pytest.mark.usefixtures("_wandb_forgets_its_process")
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_wandbs_death_ends_the_run_with_its_name_and_cure(
    make: Callable[..., WandbTracker], folder: Path, step_record: MakeStepRecord
) -> None:
    tracker = make(mode="offline")
    tracker.start()
    (core,) = children()
    core.kill()
    core.wait(10)

    def go_on() -> None:
        for _ in range(200):  # the first writes may still fit into the socket
            tracker.step(step_record())
            time.sleep(0.01)

    with pytest.raises(TrackingError, match=r"wandb died at step 3 .*metrics\.jsonl is complete.*wandb\.mode=disabled"):
        go_on()
    tracker.step(step_record())  # said once
    tracker.finish(an_end(ExitReason.FAILED))
    assert children() == []


@pytest.mark.usefixtures("_wandb_forgets_its_process")
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_wandbs_death_is_noticed_at_the_end_at_the_latest(make: Callable[..., WandbTracker]) -> None:
    tracker = make(mode="offline")
    tracker.start()
    (core,) = children()
    core.kill()
    core.wait(10)
    with pytest.raises(TrackingError, match="wandb died before the end"):
        tracker.finish(an_end())


@pytest.mark.slow  # wandb's process looks for its parent every few seconds
def test_a_killed_driver_leaves_no_wandb_process(folder: Path) -> None:
    folder.mkdir()
    program = (
        "import sys, time, psutil; from pathlib import Path; from asyncrl.tracker import WandbTracker\n"
        f"tracker = WandbTracker(folder=Path({str(folder)!r}), mode='offline', project='p', run_id='r', config={{}})\n"
        "tracker.start(); print(psutil.Process().children()[0].pid, flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, env=environment, text=True
    ) as driver:
        assert driver.stdout is not None
        core = psutil.Process(int(driver.stdout.readline()))
        driver.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([core], timeout=20)[1] == []


class _Failing:
    """A tracker that cannot be finished."""

    def start(self) -> str:
        return "failing"

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvalRecord) -> None: ...

    def samples(self, rows: object) -> None: ...

    def finish(self, summary: Summary) -> None:
        raise TrackingError("cannot finish")


@pytest.mark.parametrize("order", [1, -1])
def test_fanout_finishes_all_even_if_one_cannot(folder: Path, step_record: MakeStepRecord, order: int) -> None:
    folder.mkdir()
    jsonl = JsonlTracker(folder)
    parts: list[Tracker] = [jsonl, _Failing()]
    tracker = FanoutTracker(parts[::order])
    assert tracker.start() == "failing"
    tracker.step(step_record())
    tracker.evaluation(EVALUATION)
    tracker.samples([ROW])
    with pytest.raises(TrackingError, match="cannot finish"):
        tracker.finish(an_end())
    assert len(list(read_lines(folder / "metrics.jsonl"))) == 2
    with pytest.raises(AssertionError, match="is not open"):
        jsonl.step(step_record())  # it was closed
