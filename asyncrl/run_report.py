"""What a run says about itself, from the first line to `summary.json`: trackers, times, memory, how it ended."""

from __future__ import annotations

import os
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import anyio

from asyncrl.config import LoadedRecipe
from asyncrl.console import Console
from asyncrl.fingerprints import Fingerprints
from asyncrl.fleet import Fleet
from asyncrl.idle import BusyClock, IdleShares
from asyncrl.line_file import read_lines
from asyncrl.metrics_file import JsonlTracker
from asyncrl.run_folder import RUN_ID
from asyncrl.summary import ExitReason, Summary, SummaryBuilder, library_versions, write_summary
from asyncrl.tracker import FanoutTracker, Tracker, WandbTracker
from asyncrl.user_error import UserError
from engine.worker_process import peak_memory_bytes
from engine.workers import WorkerDied

TRACEBACK = "traceback.txt"


class RunReport:
    """Trackers and summary of one run; `close` comes last, however the run ended.

    Attributes:
        tracker: all trackers as one.
        summary: gathers what the summary needs.
        fingerprints: one line a step.
    """

    def __init__(
        self, loaded: LoadedRecipe, folder: Path, console: Console, *, resume_step: int | None, started_s: float
    ) -> None:
        """Args:
        folder: the run's.
        resume_step: None for a new run.
        started_s: `time.monotonic()` when the process began.
        """
        recipe = loaded.recipe
        wandb = recipe.tracking.wandb
        self.summary = SummaryBuilder(seed=recipe.seed, resumed_from=resume_step)
        self.tracker: Tracker = FanoutTracker(
            [
                console,
                JsonlTracker(folder, resume_step=resume_step),
                WandbTracker(
                    folder=folder,
                    mode=wandb.mode,
                    project=wandb.project,
                    run_id=(folder / RUN_ID).read_text(encoding="utf-8"),
                    config=loaded.public,
                    entity=wandb.entity,
                    group=wandb.group,
                    tags=wandb.tags,
                    resume=resume_step is not None,
                ),
            ]
        )
        self.fingerprints = Fingerprints(folder, resume_step=resume_step)
        self._folder = folder
        self._console = console
        self._is_resumed = resume_step is not None
        self._started_s = started_s
        self._startup_s: float | None = None
        self._busy: BusyClock | None = None
        self._idle: IdleShares | None = None

    async def start_tracker(self) -> None:
        """Start the trackers, in a thread: wandb takes a second."""
        line = await anyio.to_thread.run_sync(self.tracker.start)
        if line:
            self._console.line(line)
        if self._is_resumed:
            self.summary.restore(read_lines(self._folder / "metrics.jsonl"))

    def measures(self, busy: BusyClock) -> None:
        """Take the run's busy clock."""
        self._busy = busy

    def loop_starts(self) -> None:
        """Start-up is over: rates and shares count from here."""
        self._startup_s = time.monotonic() - self._started_s
        if self._busy is not None:
            self._busy.start()

    def loop_ended(self) -> None:
        """Rates and shares count up to here, however the loop ended."""
        if self._busy is not None:
            self._idle = self._busy.total()

    async def generator_memory(self, fleet: Fleet) -> None:
        """Note how much memory the replicas took so far; the trainer says so with every step."""
        self.summary.memory(await fleet.generator_peaks())

    def close(self, exit_reason: ExitReason, error: BaseException | None) -> Summary:
        """Write `summary.json`, finish the trackers, print the closing line."""
        self.summary.memory({"driver": peak_memory_bytes()})
        failure = error if exit_reason is ExitReason.FAILED else None
        summary = self.summary.build(
            exit_reason=exit_reason,
            wall_s=time.monotonic() - self._started_s,
            startup_s=self._startup_s,
            idle=self._idle,
            error=describe_error(failure) if failure is not None else None,
            libraries=library_versions(),
        )
        with ExitStack() as steps:  # a full disk, say, must not leave wandb's process behind; last in, first out
            steps.callback(self.tracker.finish, summary)
            steps.callback(self.fingerprints.close)
            steps.callback(write_summary, summary, self._folder)
            if failure is not None:
                steps.callback(self._write_traceback, failure)
        return summary

    def _write_traceback(self, error: BaseException) -> None:
        """Keep for a report of a defect what the one message on the screen leaves out."""
        handle = os.open(self._folder / TRACEBACK, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(traceback.format_exception(error))


def describe_error(error: BaseException) -> str:
    """Return the one message of an error that may sit inside groups of groups.

    Several failures at once are rare. A death is then the cause of the others; else the first one is, or arrived first.
    """
    leaves = _leaves(error)
    cause = next((leaf for leaf in leaves if isinstance(leaf, WorkerDied)), leaves[0])
    text = str(cause).strip()
    if isinstance(cause, UserError | RuntimeError) and text:
        return text

    named = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    return f"{named} (see {TRACEBACK} in the run's folder)"


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]

    return [leaf for part in error.exceptions for leaf in _leaves(part)]
