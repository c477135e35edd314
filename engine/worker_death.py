"""What to tell the user when a worker's process is gone: its name, its number, why, and its last words."""

from __future__ import annotations

import re
import time
from pathlib import Path

_NUM_LINES = 12
_NUM_BYTES = 16 << 10
_RECENT_S = 5.0


def describe_death(name: str, method: str, ray_text: str, logs: Path | None) -> str:
    """Return one message, the first line of which says everything that is known.

    Args:
        name: of the worker.
        method: that was running, or was called after the death.
        ray_text: what Ray says about it, at length.
        logs: folder with the workers' output, if it is on this machine.
    """
    found = re.search(r"^\s*pid: (\d+)$", ray_text, re.MULTILINE)
    pid = found[1] if found is not None else None
    process = f"{name} (process {pid})" if pid is not None else name
    message = f"{process} died while {method} was running or before: {_why(ray_text)}"
    words = _last_words(logs, pid) if logs is not None and pid is not None else []
    return "\n".join([f"{message}. Its last words:", *words] if words else [message])


def _why(ray_text: str) -> str:
    """The part of Ray's message that says something."""
    if "connection error code 2" in ray_text:
        return "its process is gone (killed, out of memory, or crashed)"

    detail = re.search(r"Worker exit detail: (.*?)(?:\. |$)", ray_text, re.MULTILINE)
    return detail[1] if detail is not None else ray_text.strip().splitlines()[0]


def _last_words(logs: Path, pid: str) -> list[str]:
    """The last lines that the process wrote to its standard error, if it did so just now."""
    for path in logs.glob(f"worker-*-{pid}.err"):
        if path.stat().st_mtime < time.time() - _RECENT_S:
            return []  # the warnings of its start, and not why it died

        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _NUM_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not line.startswith(":")][-_NUM_LINES:]  # :actor_name:...

    return []
