"""The run's folder: private to the user, one run in it, used by one process at a time.

RUN/recipe.yaml        what was asked for, references to the environment unresolved
    model_init/        the model that the run began with
    metrics.jsonl, samples.jsonl, wandb/
    checkpoints/, model -> the newest Hugging Face folder
    summary.json
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

RECIPE = "recipe.yaml"
MODEL_INIT = "model_init"
_LOCK = ".lock"


class RunFolderError(ValueError):
    """The folder cannot be used for this run; one line with the reason and the cure."""


class RunFolder:
    """An open run folder. The lock goes with the process, however that ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: Path, recipe_yaml: str) -> RunFolder:
        """Make a new run's folder.

        Raises:
            RunFolderError: there is a run in it already, or it cannot be made.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"run.dir={path}: {error.strerror}") from error

        if (path / RECIPE).exists():
            raise RunFolderError(f"run.dir={path} holds a run already: `--resume {path}`, or another run.dir")

        if any(path.iterdir()):
            raise RunFolderError(f"run.dir={path} is not empty and holds no run; name another folder")

        folder = cls._open(path)
        handle = os.open(path / RECIPE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(recipe_yaml)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run.

        Raises:
            RunFolderError: there is none, or a process is still at it.
        """
        if not (path / RECIPE).is_file():
            raise RunFolderError(f"--resume {path}: there is no run ({RECIPE} is missing)")

        return cls._open(path)

    @classmethod
    def _open(cls, path: Path) -> RunFolder:
        status = path.stat()
        if status.st_uid != os.getuid():
            raise RunFolderError(f"run.dir={path} belongs to uid {status.st_uid}, not to you ({os.getuid()})")

        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            path.chmod(0o700)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise RunFolderError(f"run.dir={path} is in use by another process") from error

        return cls(path, lock)

    def close(self) -> None:
        """Let the next process have it."""
        os.close(self._lock)
