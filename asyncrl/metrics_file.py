"""`metrics.jsonl` and `samples.jsonl`: a run's metrics in its own folder, whatever else tracks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.line_file import LineFile
from asyncrl.metrics import STEP_AXIS, EvalRecord, SampleRow, StepRecord, flatten, name_of
from asyncrl.summary import Summary

_METRICS = "metrics.jsonl"


def has_records(folder: Path) -> bool:
    """Return whether the run in `folder` has trained a step or evaluated its first version."""
    file = folder / _METRICS
    return file.is_file() and file.stat().st_size > 0


class JsonlTracker:
    """`metrics.jsonl` (one flat record a line) and `samples.jsonl` in the run's folder, readable by the owner only.

    Each line is one write, so a killed run leaves whole lines, at worst a torn last one, which a resume drops.

    Args:
        folder: the run's.
        resume_step: None for a new run, whose files must not be there yet. A run that is resumed at this step trains it
            (and what follows) again, so later lines are dropped, and an evaluation that is kept is not written twice.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        self._resume_step = resume_step
        self._kept_evaluations: set[int] = set()
        self._metrics = LineFile(folder / _METRICS, resume_step=resume_step)
        self._samples = LineFile(folder / "samples.jsonl", resume_step=resume_step)

    def start(self) -> str:
        """Open both files.

        Raises:
            TrackingError: a new run's folder has them already, or a line of a resumed run is broken.
            OSError: the folder cannot be written.
        """
        self._metrics.open(self._keep_metrics)
        self._samples.open(self._keep_sample)
        return ""

    def step(self, record: StepRecord) -> None:
        """Write one line."""
        self._metrics.write(flatten(record))

    def evaluation(self, record: EvalRecord) -> None:
        """Write one line, unless the run that is resumed had written it."""
        if record.version not in self._kept_evaluations:
            self._metrics.write(flatten(record))

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """Write one line a rollout, to samples.jsonl."""
        for row in rows:
            self._samples.write(asdict(row))

    def finish(self, summary: Summary) -> None:
        """Close both files."""
        self._metrics.close()
        self._samples.close()

    def _keep_metrics(self, line: Mapping[str, Any]) -> bool:
        assert self._resume_step is not None
        version = line.get(name_of(EvalRecord, "version"))
        if version is None:
            return bool(line[STEP_AXIS] < self._resume_step)

        if version <= self._resume_step:
            self._kept_evaluations.add(version)
        return bool(version <= self._resume_step)

    def _keep_sample(self, line: Mapping[str, Any]) -> bool:
        assert self._resume_step is not None
        return bool(line["step"] < self._resume_step)
