"""Records of a run that several tests feed to trackers, console and summary; the real command in a place of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.metrics import StepRecord

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "configs" / "grpo_copy.yaml"
TINY = (
    "trainer.num_steps=8",
    "trainer.prompts_per_step=8",
    "trainer.samples_per_prompt=4",
    "trainer.lr_schedule.warmup_steps=0",
    "eval.every=0",
    "tracking.wandb.mode=disabled",
)
PATIENCE_S = 240.0  # for what takes seconds on a quiet machine; a test of its own measures what must be quick


def _step_record(**changes: object) -> StepRecord:
    values: dict[str, Any] = {
        "step": 3,
        "version": 4,
        "loss": -0.25,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "entropy": 2.0,
        "clip_fraction": 0.125,
        "ratio_max": 1.25,
        "generator_kl": 0.001,
        "num_tokens": 4096,
        "num_loss_tokens": 2560,
        "skipped": False,
        "reward_mean": 0.5,
        "reward_std": 0.25,
        "accuracy": 0.75,
        "response_length_mean": 5.0,
        "finished_share": 1.0,
        "num_samples": 512,
        "num_failures": 0,
        "num_response_tokens": 2560,
        "staleness": 1,
        "step_s": 0.5,
        "generate_s": 0.4,
        "train_s": 0.45,
        "trainer_wait_s": 0.05,
        "generator_wait_s": 0.1,
        "trainer_idle": 0.1,
        "generator_idle": 0.2,
        "overlap": 0.7,
        "snapshot_ms": 1.0,
        "prepare_ms": 2.0,
        "flip_ms": 4.0,
        "publish_bytes": 500_000,
        "publish_memory_bytes": 1_500_000,
        "peak_memory_bytes": {"trainer_0": 512_000_000, "generator_0": 1_500_000_000},
    }
    values.update(changes)
    return StepRecord(**values)


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    """Makes a full step record (step 3 of a copy run); keyword arguments change fields."""
    return _step_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run that has ended: what it printed and wrote."""

    exit_code: int
    stdout: str
    stderr: str
    run: Path

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        loaded: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return loaded

    @property
    def fingerprints(self) -> list[dict[str, Any]]:
        """Lines of fingerprints.jsonl."""
        return _lines(self.run / "fingerprints.jsonl")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        return _lines(self.run / "metrics.jsonl")

    def metrics_of(self, name: str) -> list[dict[str, Any]]:
        """Those lines of metrics.jsonl that have a metric, for instance "train/loss"."""
        return [line for line in self.metrics if name in line]

    def message(self) -> str:
        """The one message that says why the run ended."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, f"{len(lines)} messages: {self.stderr}"
        return lines[0]


@dataclass
class Train:
    """`python -m asyncrl.train` in a session, a temporary folder and a home of its own.

    Attributes:
        place: holds the run's folder, its output, and `tmp` and `home`.
        process: the driver.
    """

    place: Path
    process: subprocess.Popen[bytes]
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    @classmethod
    def start(cls, place: Path, *arguments: str, config: Path | None = RECIPE, **environment: str) -> Train:
        """Run `asyncrl train --config RECIPE run.dir=PLACE/run arguments`; without a config the arguments alone."""
        for name in ("tmp", "home"):
            (place / name).mkdir(exist_ok=True)
        first = ["--config", str(config), f"run.dir={place / 'run'}"] if config is not None else []
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "WANDB_", "VLLM_"))}
        own = {"TMPDIR": str(place / "tmp"), "HOME": str(place / "home"), "ASYNCRL_TEST_RUN": str(place)}
        with (place / "stdout").open("wb") as stdout, (place / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "asyncrl.train", *first, *arguments],
                cwd=place,
                env=keep | own | environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        return cls(place, process)

    def wait(self, *, within_s: float = PATIENCE_S) -> Ended:
        """Wait for the driver's end."""
        exit_code = self.process.wait(timeout=within_s)
        return Ended(
            exit_code=exit_code,
            stdout=(self.place / "stdout").read_text(),
            stderr=(self.place / "stderr").read_text(),
            run=self.place / "run",
        )

    def wait_until(self, what: str, happened: Callable[[], object], *, within_s: float = PATIENCE_S) -> None:
        """Wait until something has happened in a run that goes on."""
        deadline = time.monotonic() + within_s
        while not happened():
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended before: {what}\n{(self.place / 'stderr').read_text()}")

            assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
            time.sleep(0.02)

    def wait_for_output(self, text: str) -> None:
        """Wait until the run has printed a text."""
        self.wait_until(f"printing {text!r}", lambda: text in (self.place / "stdout").read_text())

    def processes(self) -> list[psutil.Process]:
        """The run's processes that live: of its session, or with its environment."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                own = os.getsid(process.pid) == self.process.pid
                if own or process.environ().get("ASYNCRL_TEST_RUN") == str(self.place):
                    found[process.pid] = process
            except (psutil.Error, OSError):  # ended meanwhile
                continue
        self.seen |= found
        return [process for process in self.seen.values() if process.is_running() and not _is_zombie(process)]

    def worker(self, title: str) -> psutil.Process:
        """The one worker whose process title has this text, for instance "GeneratorWorker"."""
        (found,) = [process for process in self.processes() if f"ray::{title}" in " ".join(process.cmdline())]
        return found

    def workers(self, title: str) -> list[psutil.Process]:
        """All such workers."""
        return [process for process in self.processes() if f"ray::{title}" in " ".join(process.cmdline())]

    def shared_memory(self) -> Path:
        """The run's shared-memory folder: the driver holds its lock."""
        held = [Path(file.path).parent for file in psutil.Process(self.process.pid).open_files()]
        (folder,) = [folder for folder in held if folder.is_relative_to("/dev/shm")]
        return folder

    def left_in_tmp(self) -> list[str]:
        """What is in the run's temporary folder."""
        return sorted(path.name for path in (self.place / "tmp").iterdir())

    def wait_until_gone(self, *, within_s: float) -> None:
        """Wait until no process of the run is left."""
        deadline = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < deadline, f"left after {within_s} s: {[_title(process) for process in left]}"
            time.sleep(0.05)

    def close(self) -> None:
        """Kill what is left, after a test that failed."""
        for process in self.processes():
            process.kill()
        self.process.wait()


StartTrain = Callable[..., Train]


@pytest.fixture(scope="session")
def start_train() -> Iterator[StartTrain]:
    """`start_train(*overrides)` starts the real command with a tiny recipe; what is left of it ends with the session.

    A short path: Ray's sockets are below it.
    """
    places: list[Path] = []
    started: list[Train] = []

    def start(*arguments: str, place: Path | None = None, tiny: bool = True, **options: Any) -> Train:  # noqa: ANN401
        if place is None:
            place = Path("/tmp", f"a{secrets.token_hex(3)}")
            place.mkdir(mode=0o700)
            places.append(place)
        started.append(Train.start(place, *(TINY if tiny else ()), *arguments, **options))
        return started[-1]

    yield start
    for train in started:
        train.close()
    for place in places:
        shutil.rmtree(place)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _title(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:100]}"
    except psutil.Error:
        return f"{process.pid} (ended)"
