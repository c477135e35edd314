"""What to tell the user of a worker that failed: its error; of one that died, who it was, why, and its last words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_NUM_LINES = 12
_NUM_BYTES = 16 << 10
_FILE_TIME_LAG_S = 0.05  # the kernel stamps files with the time of its last tick


def describe_death(name: str, method: str | None, ray_text: str, logs: Path | None, *, since_s: float) -> str:
    """Return one message, the first line of which says everything that is known.

    Args:
        name: of the worker.
        method: that was running, or was called after the death; None if nobody waited for an answer.
        ray_text: what Ray says about it, at length.
        logs: folder with the workers' output, if it is on this machine.
        since_s: Unix time; words from before are left out: warnings of its start, and not why it died.
    """
    found = re.search(r"^\s*pid: (\d+)$", ray_text, re.MULTILINE)
    pid = found[1] if found is not None else None
    process = f"{name} (process {pid})" if pid is not None else name
    when = f"died while {method} was running or before" if method is not None else "died"
    message = f"{process} {when}: {_why(ray_text)}"
    words = _last_words(logs, pid, since_s) if logs is not None and pid is not None else []
    return "\n".join([f"{message}. Its last words:", *words] if words else [message])


def describe_raised(error: Any) -> str:  # noqa: ANN401
    """Return type and message of what a worker raised, from Ray's error around it."""
    cause = error.cause if isinstance(error.cause, BaseException) else error
    return f"{type(cause).__name__}: {cause}"


def first_line(error: BaseException) -> str:
    """Return the first line of a message; the error's type if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def last_line(error: BaseException) -> str:
    """Return the last line of a message that has one: Ray puts the worker's traceback before it."""
    return str(error).strip().splitlines()[-1]


def _why(ray_text: str) -> str:
    """The part of Ray's message that says something."""
    if "connection error code 2" in ray_text:
        return "its process is gone (killed, out of memory, or crashed)"

    detail = re.search(r"Worker exit detail: (.*?)(?:\. |$)", ray_text, re.MULTILINE)
    return detail[1] if detail is not None else ray_text.strip().splitlines()[0]


def _last_words(logs: Path, pid: str, since_s: float) -> list[str]:
    """The last lines that the process wrote to its standard error, if it wrote any since then."""
    for path in logs.glob(f"worker-*-{pid}.err"):
        if path.stat().st_mtime < since_s - _FILE_TIME_LAG_S:
            return []

        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _NUM_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not line.startswith(":")][-_NUM_LINES:]  # :actor_name:...

    return []
