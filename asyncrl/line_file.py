"""Files of JSON lines that survive a kill: whole lines, at worst a torn last one, which a resume drops."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.escape import escape
from asyncrl.metrics import to_json
from asyncrl.tracker import TrackingError


class LineFile:
    """One file, appended to, a line a write, readable by its owner only. Calls: `open`, `write`, `close`.

    Args:
        path: where.
        resume_step: None for a new run, whose file must not be there yet.
    """

    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        self._path = path
        self._resume_step = resume_step
        self._descriptor = -1

    def open(self, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """Open it; of a resumed run's file only the lines that `keep` wants remain.

        Raises:
            TrackingError: a new run's file is there already, or a line of a resumed run's is broken.
            OSError: the folder cannot be written.
        """
        self._descriptor = _open_lines(self._path, keep, self._resume_step)

    def write(self, values: Mapping[str, object]) -> None:
        """Append one line."""
        _write_line(self._descriptor, values)

    def close(self) -> None:
        """Close it, also if it was never opened."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


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
