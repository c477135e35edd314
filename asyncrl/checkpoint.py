"""Checkpoints: a Megatron checkpoint and a Hugging Face folder of one version, complete or not there at all.

    RUN/checkpoints/step-000100/megatron/    weights, optimizer, counters, as the training ranks write them
                                hf/          safetensors, config, tokenizer: vLLM and transformers open it
                                state.json   written last but one; the rename is the last
    RUN/model -> checkpoints/step-000100/hf  the newest

A checkpoint is filled under another name, synced to disk and renamed: a kill at any moment leaves the last complete
one. Megatron's files contain pickles, so a checkpoint is loaded only if this user owns it, nobody else can write to it
and its pickled parts still hash to what state.json says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from engine.types import WeightVersion

_PREFIX = "step-"
_PARTIAL = ".partial-"
_STATE = "state.json"
_PICKLES = (".metadata", "common.pt")


class CheckpointError(ValueError):
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
        self._folder = run_folder / "checkpoints"
        self._seed = seed
        self._keep_last = keep_last

    async def write(self, version: WeightVersion, fill: Callable[[Path, Path], Awaitable[None]]) -> Checkpoint:
        """Write one checkpoint; `fill(megatron folder, hf folder)` gets two empty folders."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        final = self._folder / f"{_PREFIX}{version:06d}"
        if final.exists():  # of a lineage that a resume has left behind
            shutil.rmtree(final)
        partial = self._folder / f"{_PARTIAL}{final.name}"
        shutil.rmtree(partial, ignore_errors=True)
        megatron, hf = partial / "megatron", partial / "hf"
        for folder in (partial, megatron, hf):
            folder.mkdir(mode=0o700)
        await fill(megatron, hf)
        state = CheckpointState(version=version, seed=self._seed, pickle_sha256=_hash_pickles(megatron))
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
        await anyio.to_thread.run_sync(_sync_tree, partial)
        partial.rename(final)
        _sync_folder(self._folder)
        self._point_at(final)
        self._prune()
        return Checkpoint(folder=final, state=state)

    def newest(self) -> Checkpoint:
        """Return the newest complete checkpoint, checked.

        Raises:
            CheckpointError: there is none, or it belongs to somebody else, or its pickles are not the ones written.
        """
        complete = self._complete()
        if not complete:
            raise CheckpointError(f"{self._folder} holds no complete checkpoint; start the run anew")

        folder = complete[-1]
        _check_owner(folder)
        state = _read_state(folder)
        found = _hash_pickles(folder / "megatron")
        if found != dict(state.pickle_sha256):
            changed = sorted(name for name, digest in state.pickle_sha256.items() if found.get(name) != digest)
            raise CheckpointError(
                f"{folder}: {', '.join(changed) or 'a file'} is not what the run wrote (sha256 differs); "
                "it is a pickle and will not be loaded"
            )

        if state.seed != self._seed:
            raise CheckpointError(f"{folder} was written with seed {state.seed}, the recipe says seed={self._seed}")

        return Checkpoint(folder=folder, state=state)

    def _complete(self) -> list[Path]:
        return sorted(p for p in self._folder.glob(f"{_PREFIX}*") if (p / _STATE).is_file())

    def _point_at(self, final: Path) -> None:
        """Move the link RUN/model in one step."""
        draft = self._run_folder / ".model"
        draft.unlink(missing_ok=True)
        draft.symlink_to(final.relative_to(self._run_folder) / "hf")
        draft.rename(self._run_folder / "model")

    def _prune(self) -> None:
        for old in self._complete()[: -self._keep_last]:
            (old / _STATE).unlink()  # first: a half-removed one is not complete
            shutil.rmtree(old)


def _read_state(folder: Path) -> CheckpointState:
    path = folder / _STATE
    try:
        state = CheckpointState(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error

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

        if stat.S_ISLNK(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CheckpointError(
                f"{path} has mode {stat.filemode(status.st_mode)}: others could have changed it; not loaded. "
                "If you trust it: chmod -R go-w"
            )


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
