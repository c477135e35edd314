"""A private folder that lives as long as the process that made it: locked by it, swept by a later one when it is dead.

The folder is ROOT/<kind>-<uid>-<name>, mode 0700. Its maker holds `run.lock` in it (flock) as long as it lives. One of
this user and kind whose lock is free belongs to a dead process; the next `create` of that kind removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

_LOCK_NAME = "run.lock"


class LockedFolder:
    """A folder of this process, from `create` to `close`.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, root: Path, kind: str, name: str) -> LockedFolder:
        """Sweep what dead processes of this user left, make the folder and lock it.

        Raises:
            FileExistsError: it is there and could not be swept: somebody lives in it, or it is not ours.
        """
        sweep(root, kind)
        path = root / f"{_prefix(kind)}{name}"
        while True:
            path.mkdir(mode=0o700)
            lock = _create_lock(path)
            if lock is not None:
                return cls(path, lock)

    def close(self) -> None:
        """Remove the folder with everything in it and give up the lock. Idempotent.

        What a dying process still writes into it meanwhile is left to the next sweep.
        """
        if self._lock is None:
            return

        _remove(self.path)
        os.close(self._lock)
        self._lock = None


def sweep(root: Path, kind: str) -> list[Path]:
    """Remove this user's folders of dead processes (their lock is free) and return them."""
    removed: list[Path] = []
    for path in sorted(root.glob(f"{_prefix(kind)}*")):
        lock = _take_free_lock(path)
        if lock is not None:
            _remove(path)
            os.close(lock)
            removed.append(path)
    return removed


def _prefix(kind: str) -> str:
    return f"{kind}-{os.geteuid()}-"


def _create_lock(path: Path) -> int | None:
    """Create and take the lock of a new folder; None if a sweep took the folder for a dead one in this very moment."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(path / _LOCK_NAME, flags, 0o600)
    except FileNotFoundError:
        return None

    fcntl.flock(lock, fcntl.LOCK_EX)  # waits for that sweep, which has unlinked the file by then
    return _unless_swept(lock)


def _take_free_lock(path: Path) -> int | None:
    """Take the lock of a dead process's folder; None if it lives, is not ours, or is just being made or swept."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None

    try:
        info = os.fstat(folder)
        if info.st_uid != os.geteuid() or info.st_mode & 0o777 != 0o700:
            return None

        lock = os.open(_LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        # Killed between mkdir and lock, or not there yet. Only an empty folder goes, and its creator then starts again.
        with suppress(OSError):
            path.rmdir()
        return None
    finally:
        os.close(folder)

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None

    return _unless_swept(lock)


def _unless_swept(lock: int) -> int | None:
    """Return the lock if its file still exists; whoever took it earlier may have removed the folder."""
    if os.fstat(lock).st_nlink == 1:
        return lock

    os.close(lock)
    return None


def _remove(path: Path) -> None:
    """Remove everything in the folder, the lock last: a removal that is cut short can be taken up again."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != _LOCK_NAME:
            Path(entry.path).unlink(missing_ok=True)
    if [entry.name for entry in os.scandir(path)] == [_LOCK_NAME]:
        (path / _LOCK_NAME).unlink()
        with suppress(OSError):  # a dying process made something in this very moment
            path.rmdir()
