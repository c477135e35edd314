"""The run's private folder of shared memory: made and locked by the driver, swept when its run is dead.

It is a `LockedFolder` under /dev/shm named asyncrl-<uid>-<run_id>: one of this user whose run is dead is removed at the
next start.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import locked_folder
from engine.locked_folder import LockedFolder

SHARED_MEMORY_ROOT = Path("/dev/shm")

_KIND = "asyncrl"


class WeightTransferError(RuntimeError):
    """Weights that are not what the manifest says, or memory that is not ours; the message names what differs."""


class RunSegments:
    """The run's folder of shared memory, owned by the driver from `create` to `close`.

    Attributes:
        folder: hand it to `SnapshotWriter` and `Receiver`.
    """

    def __init__(self, locked: LockedFolder) -> None:
        self.folder = locked.path
        self._locked = locked

    @classmethod
    def create(cls, run_id: str, *, num_bytes: int = 0, root: Path = SHARED_MEMORY_ROOT) -> RunSegments:
        """Sweep what dead runs of this user left, check the space, make the folder and lock it.

        Args:
            run_id: names the folder; letters, digits, `.`, `_`, `-`.
            num_bytes: what the run will need (`store_bytes`); 0 checks nothing.
            root: a file system in memory.

        Raises:
            ValueError: the run id is no file name, or a live run has it.
            WeightTransferError: there is not enough space, with both numbers and the cure.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run_id):
            raise ValueError(f"run id {run_id!r} is no file name: use letters, digits, '.', '_' and '-'")

        sweep(root)
        check_space(root, num_bytes)
        try:
            return cls(LockedFolder.create(root, _KIND, run_id))
        except FileExistsError as error:
            raise ValueError(
                f"{error.filename} exists and could not be swept: run {run_id} is live (its lock is held), or the "
                "folder is not a private one of this user; take another run id or remove it"
            ) from None

    def close(self) -> None:
        """Remove the folder with everything in it, dead ranks' files too, and give up the lock. Idempotent."""
        self._locked.close()

    def __enter__(self) -> RunSegments:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep(root: Path = SHARED_MEMORY_ROOT) -> list[Path]:
    """Remove the folders of this user's dead runs (their lock is free) and return them."""
    return locked_folder.sweep(root, _KIND)


def check_space(root: Path, num_bytes: int) -> None:
    """Raise WeightTransferError unless `num_bytes` fit into the file system, with both numbers and the cure."""
    info = os.statvfs(root)
    free = info.f_bavail * info.f_frsize
    if num_bytes > free:
        raise WeightTransferError(
            f"{root} has {free:,} bytes free, the weight versions need {num_bytes:,}. Containers often get 64 MB: give "
            f"it more (docker run --shm-size=..., or mount -o remount,size=... {root}) or lower schedule.max_staleness"
        )


def check_private(path: Path, info: os.stat_result, *, is_folder: bool) -> None:
    """Raise unless it is ours alone: 0700 for the folder, 0600 for a file, owned by this user."""
    kind, mode = ("folder", 0o700) if is_folder else ("file", 0o600)
    if not (stat.S_ISDIR(info.st_mode) if is_folder else stat.S_ISREG(info.st_mode)):
        raise WeightTransferError(f"{path} is no {kind}")

    if info.st_uid != os.geteuid():
        raise WeightTransferError(f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}")

    if info.st_mode & 0o777 != mode:
        raise WeightTransferError(f"{path} has mode {info.st_mode & 0o777:03o}, a private {kind} has {mode:03o}")


@contextmanager
def private_folder(folder: Path) -> Iterator[int]:
    """Open the run's folder, having checked that it is private; files are opened relative to it."""
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise WeightTransferError(f"{folder}: {error.strerror}") from error

    try:
        check_private(folder, os.fstat(folder_fd), is_folder=True)
        yield folder_fd
    finally:
        os.close(folder_fd)
