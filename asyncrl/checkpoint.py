"""Checkpoints: a Megatron checkpoint and a Hugging Face folder of one version, complete or not there at all.

    RUN/checkpoints/step-000100/megatron/    weights, optimizer, counters, as the training ranks write them
                                hf/          safetensors, config, tokenizer: vLLM and transformers open it
                                state.json   written last
    RUN/model -> checkpoints/step-000100/hf  the newest

A checkpoint is filled under another name, synced to disk and renamed: a kill at any moment leaves the last complete
one. Megatron's files contain pickles, so a checkpoint is loaded only if this user owns it, nobody else can write to it
and its pickled parts still hash to what state.json says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from asyncrl.run_folder import CHECKPOINTS
from asyncrl.user_error import UserError
from engine.types import WeightVersion

_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL, _DISCARDED = ".partial-", ".discarded-"
_STATE = "state.json"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_GO_BACK = "Move that folder away to go on from the checkpoint before it"
_PICKLES = (".metadata", "common.pt")


class CheckpointError(UserError):
    """There is no checkpoint to go on from, or it must not be loaded; says which file and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a resumed run must know besides the weights.

    Attributes:
        version: the weight version; the run goes on with the step of that number.
        seed: the recipe's; another one would draw other samples under the same names.
        pickle_sha256: file below megatron/ -> sha256, for the files that Megatron pickles.
    """

    version: int
    seed: int
    pickle_sha256: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    state: CheckpointState

    @property
    def megatron(self) -> Path:
        """What `Trainer.load` takes."""
        return self.folder / "megatron"

    @property
    def hf(self) -> Path:
        """The Hugging Face folder."""
        return self.folder / "hf"


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, run_folder: Path, *, seed: int, keep_last: int) -> None:
        """Args:
        keep_last: complete checkpoints that stay, >= 1.
        """
        self._run_folder = run_folder
        self._folder = run_folder / CHECKPOINTS
        self._seed = seed
        self._keep_last = keep_last

    async def write(self, version: WeightVersion, fill: Callable[[Path, Path], Awaitable[None]]) -> Checkpoint:
        """Write one checkpoint; `fill(megatron folder, hf folder)` gets two empty folders.

        The disk is waited for in a thread: the other loops go on meanwhile.
        """
        partial = self._folder / f"{_PARTIAL}{_name(version)}"
        megatron, hf = partial / "megatron", partial / "hf"
        await anyio.to_thread.run_sync(self._make_room, partial, megatron, hf)
        await fill(megatron, hf)
        return await anyio.to_thread.run_sync(self._complete, version, partial)

    def newest(self) -> Checkpoint:
        """Return the newest complete checkpoint, checked, and point RUN/model at it, should a kill have prevented that.

        Raises:
            CheckpointError: there is none, or it belongs to somebody else, or its pickles are not the ones written.
        """
        folders = self._folders()
        if not folders:
            raise CheckpointError(f"{self._folder} holds no complete checkpoint; start anew with another run.dir")

        folder = folders[-1]
        _check_owner(folder)
        state = _read_state(folder)
        if state.seed != self._seed:
            raise CheckpointError(
                f"{folder} was written with seed {state.seed}, the recipe says seed={self._seed}; resume with "
                f"seed={state.seed}, or start anew with another run.dir"
            )

        found = _hash_pickles(folder / "megatron")
        changed = sorted(name for name in _PICKLES if found.get(name) != state.pickle_sha256.get(name))
        if changed:
            raise CheckpointError(
                f"{folder}: {', '.join(changed)} is not what the run wrote (sha256 differs); it is a pickle and will "
                f"not be loaded. {_GO_BACK}"
            )

        self._point_at(folder)
        return Checkpoint(folder=folder, state=state)

    def _make_room(self, *folders: Path) -> None:
        """Remove what killed processes left (the run's lock is ours, so no other lives) and make empty folders."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for left in [*self._folder.glob(f"{_PARTIAL}*"), *self._folder.glob(f"{_DISCARDED}*")]:
            shutil.rmtree(left)
        for folder in folders:
            folder.mkdir(mode=0o700)

    def _complete(self, version: WeightVersion, partial: Path) -> Checkpoint:
        """Make a filled folder a checkpoint: the rename is the moment from which it counts."""
        state = CheckpointState(version=version, seed=self._seed, pickle_sha256=_hash_pickles(partial / "megatron"))
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
        _close_to_others(partial)
        _sync_tree(partial)
        final = self._folder / _name(version)
        if final.exists():
            self._discard(final)
        partial.rename(final)
        _sync_folder(self._folder)
        self._point_at(final)
        for old in self._folders()[: -self._keep_last]:
            self._discard(old)
        return Checkpoint(folder=final, state=state)

    def _folders(self) -> list[Path]:
        """Complete checkpoints, oldest first; what a user put beside them (`step-000100-good`) is the user's."""
        named = [(match, path) for path in self._folder.glob("*") if (match := _NAME.fullmatch(path.name)) is not None]
        return [path for _, path in sorted((int(match[1]), path) for match, path in named if (path / _STATE).is_file())]

    def _discard(self, folder: Path) -> None:
        """Remove a checkpoint; renamed first, so that a half-removed one never looks complete."""
        doomed = folder.with_name(f"{_DISCARDED}{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def _point_at(self, final: Path) -> None:
        """Move the link RUN/model in one step."""
        draft = self._run_folder / ".model"
        draft.unlink(missing_ok=True)
        draft.symlink_to(final.relative_to(self._run_folder) / "hf")
        draft.rename(self._run_folder / "model")


def _name(version: int) -> str:
    return f"step-{version:06d}"


def _read_state(folder: Path) -> CheckpointState:
    path = folder / _STATE
    try:
        values = json.loads(path.read_text())
        state = CheckpointState(
            version=int(values["version"]), seed=int(values["seed"]), pickle_sha256=dict(values["pickle_sha256"])
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is broken ({type(error).__name__}: {error}). {_GO_BACK}") from error

    if folder.name != _name(state.version):
        raise CheckpointError(f"{path} speaks of version {state.version}: the folder was renamed. {_GO_BACK}")

    return state


def _hash_pickles(megatron: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((megatron / name).read_bytes()).hexdigest()
        for name in _PICKLES
        if (megatron / name).is_file()
    }


def _check_owner(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        if status.st_uid != os.getuid():
            raise CheckpointError(f"{path} belongs to uid {status.st_uid}, not to you ({os.getuid()}); not loaded")

        if stat.S_ISLNK(status.st_mode):
            raise CheckpointError(f"{path} is a symbolic link, which the run never writes; not loaded. {_GO_BACK}")

        if status.st_mode & _OTHERS_WRITE:
            raise CheckpointError(
                f"{path} has mode {stat.filemode(status.st_mode)}: others could have changed it; not loaded. "
                f"If you trust it: chmod -R go-w {folder}"
            )


def _close_to_others(folder: Path) -> None:
    """Take write permission from others: a umask of 002 gives it to the group, and loading would then refuse."""
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if mode & _OTHERS_WRITE and not stat.S_ISLNK(mode):
            path.chmod(stat.S_IMODE(mode) & ~_OTHERS_WRITE)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
