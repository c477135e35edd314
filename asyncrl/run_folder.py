"""The run's folder: private to the user, one run in it, used by one process at a time.

RUN/recipe.yaml        what was asked for, references to the environment unresolved; its presence makes it a run
    run_id             the run's name in wandb
    model_init/        the model that the run began with
    metrics.jsonl, samples.jsonl, fingerprints.jsonl, wandb/
    checkpoints/, model -> the newest Hugging Face folder
    summary.json, traceback.txt of a run that failed
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path

from asyncrl.metrics_file import has_records
from asyncrl.user_error import UserError

RECIPE = "recipe.yaml"
RUN_ID = "run_id"
MODEL_INIT = "model_init"
CHECKPOINTS = "checkpoints"
_LOCK = ".lock"
_DRAFT = ".recipe.yaml"
_WRITTEN = {
    _LOCK, _DRAFT, RECIPE, RUN_ID, MODEL_INIT, CHECKPOINTS, "model", "wandb",
    "metrics.jsonl", "samples.jsonl", "fingerprints.jsonl", "summary.json", "traceback.txt",
}  # fmt: skip
_DRAFTS = (f".{MODEL_INIT}.", ".summary.")  # of the model and of summary.json, left by a process that died


class RunFolderError(UserError):
    """The folder cannot be used for this run; one line with the reason and the cure."""


class RunFolder:
    """An open run folder: `with RunFolder.create(path, recipe_yaml) as folder`.

    The lock goes with the process, however that ends.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, path: Path, recipe_yaml: str) -> RunFolder:
        """Make a new run's folder; one whose run never came to its first step is begun again.

        Raises:
            RunFolderError: there is a run in it already, a process is at it, or it cannot be made.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"run.dir={path}: {error.strerror}; name another folder") from error

        _check_owner(path)
        _check_unused(path)  # before anything in it is touched
        folder = cls._take(path)
        try:
            _check_unused(path)  # somebody else's run may have begun and ended meanwhile
            _clear(path)
            _name(path)
            folder.remember(recipe_yaml)
        except BaseException:
            folder.close()
            raise

        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of an earlier run.

        Raises:
            RunFolderError: there is none, or a process is still at it.
        """
        if not (path / RECIPE).is_file():
            raise RunFolderError(f"--resume {path}: there is no run ({RECIPE} is missing); name the run's folder")

        _check_owner(path)
        folder = cls._take(path)
        _name(path)
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def remember(self, recipe_yaml: str) -> None:
        """Keep what the run goes on with, for the next resume."""
        _write_private(self.path / _DRAFT, recipe_yaml)
        (self.path / _DRAFT).rename(self.path / RECIPE)

    def close(self) -> None:
        """Let the next process have it. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    @classmethod
    def _take(cls, path: Path) -> RunFolder:
        """Close the folder to all others and lock it."""
        lock = -1
        try:
            path.chmod(0o700)
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lock >= 0:
                os.close(lock)
            why = "in use by another process" if isinstance(error, BlockingIOError) else f"not usable: {error.strerror}"
            raise RunFolderError(f"run.dir={path} is {why}; name another folder") from error

        return cls(path, lock)


def _check_owner(path: Path) -> None:
    owner = path.stat().st_uid
    if owner != os.getuid():
        raise RunFolderError(
            f"run.dir={path} belongs to uid {owner}, not to you ({os.getuid()}); name a folder of your own"
        )


def _check_unused(path: Path) -> None:
    """Raise unless the folder is empty, or holds a run that never came to its first step and can be begun again."""
    if (path / RECIPE).exists() and (has_records(path) or any((path / CHECKPOINTS).glob("*"))):
        raise RunFolderError(f"run.dir={path} holds a run already: `--resume {path}`, or another run.dir")

    others = sorted(name for name in os.listdir(path) if name not in _WRITTEN and not name.startswith(_DRAFTS))
    if others:
        raise RunFolderError(f"run.dir={path} is not empty ({others[0]}) and holds no run; name another folder")


def _clear(path: Path) -> None:
    """Remove what a run that never came to its first step left, but for its lock, which is ours now, and its name."""
    for entry in path.iterdir():
        if entry.name in (_LOCK, RUN_ID):
            continue

        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _name(path: Path) -> None:
    """Give a run its id, once: it must outlive a move of the folder, a copy and a chmod."""
    if not (path / RUN_ID).exists():
        _write_private(path / RUN_ID, secrets.token_hex(5))


def _write_private(path: Path, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
