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

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


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
        assert self._descriptor < 0, f"{self._path} is open already"
        flags = _FLAGS
        if self._resume_step is None:
            flags |= os.O_EXCL
        elif self._path.exists():
            _rewrite(self._path, keep)
        try:
            self._descriptor = os.open(self._path, flags, 0o600)
        except FileExistsError:
            message = f"{self._path} is there already: resume that run, or choose another run.dir"
            raise TrackingError(message) from None

    def write(self, values: Mapping[str, object]) -> None:
        """Append one line.

        Raises:
            TrackingError: it could not be written in full.
            OSError: nor in part.
        """
        assert self._descriptor >= 0, f"{self._path} is not open"
        line = (to_json(values) + "\n").encode()
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise TrackingError(f"{self._path}: only {written} of {len(line)} bytes of a line written; disk full?")

    def close(self) -> None:
        """Close it, also if it was never opened."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a `.jsonl` file that a run wrote; a torn last line (no line end) is left out.

    Raises:
        TrackingError: a whole line is not a JSON object; names file and line.
    """
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return

            try:
                line = json.loads(text)
            except ValueError as error:  # not JSON, or not even text
                raise TrackingError(f"{path}:{number} is not JSON ({error}); remove the line to resume") from None

            if not isinstance(line, dict):
                shown = escape(text.decode().strip(), limit=80)
                raise TrackingError(f"{path}:{number} is not a JSON object: {shown}; remove the line to resume")

            yield line


def _rewrite(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drop the lines that `keep` does not want, and a torn last one; all or nothing."""
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            for number, line in enumerate(read_lines(path), start=1):
                if _wanted(path, number, line, keep):
                    file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _wanted(path: Path, number: int, line: Mapping[str, Any], keep: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        return keep(line)
    except (KeyError, TypeError) as error:  # the field that says which step it is of
        raise TrackingError(f"{path}:{number} is not a line of a run ({error}); remove the line to resume") from None
