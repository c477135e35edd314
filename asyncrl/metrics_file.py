"""`metrics.jsonl` and `samples.jsonl`: a run's metrics in its own folder, whatever else tracks it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.escape import escape
from asyncrl.metrics import STEP_AXIS, EvalRecord, SampleRow, StepRecord, flatten, name_of, to_json
from asyncrl.summary import Summary
from asyncrl.tracker import TrackingError


class JsonlTracker:
    """`metrics.jsonl` (one flat record a line) and `samples.jsonl` in the run's folder, readable by the owner only.

    Each line is one write, so a killed run leaves whole lines, at worst a torn last one, which a resume drops.

    Args:
        folder: the run's.
        resume_step: None for a new run, whose files must not be there yet. A run that is resumed at this step trains it
            (and what follows) again, so later lines are dropped, and an evaluation that is kept is not written twice.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        self._folder = folder
        self._resume_step = resume_step
        self._kept_evaluations: set[int] = set()
        self._metrics = -1  # file descriptors
        self._samples = -1

    def start(self) -> str:
        """Open both files.

        Raises:
            TrackingError: a new run's folder has them already, or a line of a resumed run is broken.
            OSError: the folder cannot be written.
        """
        self._metrics = _open_lines(self._folder / "metrics.jsonl", self._keep_metrics, self._resume_step)
        self._samples = _open_lines(self._folder / "samples.jsonl", self._keep_sample, self._resume_step)
        return ""

    def step(self, record: StepRecord) -> None:
        """Write one line."""
        _write_line(self._metrics, flatten(record))

    def evaluation(self, record: EvalRecord) -> None:
        """Write one line, unless the run that is resumed had written it."""
        if record.version not in self._kept_evaluations:
            _write_line(self._metrics, flatten(record))

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """Write one line a rollout, to samples.jsonl."""
        for row in rows:
            _write_line(self._samples, asdict(row))

    def finish(self, summary: Summary) -> None:
        """Close both files."""
        for descriptor in (self._metrics, self._samples):
            if descriptor >= 0:
                os.close(descriptor)
        self._metrics = self._samples = -1

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


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a `.jsonl` file that a tracker wrote; a torn last line (no line end) is left out.

    Raises:
        TrackingError: a whole line is not a JSON object; names file and line.
    """
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                return

            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise TrackingError(f"{path}:{number} is not JSON ({error}); remove the line to resume") from None

            if not isinstance(line, dict):
                raise TrackingError(f"{path}:{number} is not a JSON object: {escape(text, limit=80)}")

            yield line


def _open_lines(path: Path, keep: Callable[[Mapping[str, Any]], bool], resume_step: int | None) -> int:
    """Open for appending; of a resumed run's file only the lines that `keep` wants remain."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    if resume_step is None:
        try:
            return os.open(path, flags | os.O_EXCL, 0o600)
        except FileExistsError:
            raise TrackingError(f"{path} is there already: resume that run, or choose another run.dir") from None

    if path.exists():
        handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(to_json(line) + "\n" for line in read_lines(path) if keep(line))
            os.replace(draft, path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    return os.open(path, flags, 0o600)


def _write_line(descriptor: int, values: Mapping[str, object]) -> None:
    assert descriptor >= 0, "the tracker was not started"
    line = (to_json(values) + "\n").encode()
    written = os.write(descriptor, line)
    if written != len(line):
        raise TrackingError(f"only {written} of {len(line)} bytes of a metrics line could be written: disk full?")
