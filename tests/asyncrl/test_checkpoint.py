"""Checkpoints: complete or not there at all, pruned by version, loaded only if nobody else can have touched them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.from_thread
import pytest

from asyncrl.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from engine.types import WeightVersion

SEED = 3
FILES = {"megatron/.metadata", "megatron/common.pt", "megatron/__0_0.distcp", "hf/config.json", "hf/model.safetensors"}


class Boom(RuntimeError):
    pass


async def fill(megatron: Path, hf: Path) -> None:
    """Write what the training ranks would, different in every version."""
    for folder in (megatron, hf):
        assert list(folder.iterdir()) == [], "the folders are empty"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    version = megatron.parent.name
    for name in FILES:
        (megatron.parent / name).write_text(f"{name} of {version}")


def store(run: Path, *, seed: int = SEED, keep_last: int = 2) -> CheckpointStore:
    return CheckpointStore(run, seed=seed, keep_last=keep_last)


def write(run: Path, *versions: int, keep_last: int = 2) -> Checkpoint:
    run.mkdir(exist_ok=True)

    async def main() -> Checkpoint:
        written = [await store(run, keep_last=keep_last).write(WeightVersion(version), fill) for version in versions]
        return written[-1]

    return anyio.run(main)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_was_written_is_found_and_the_model_link_leads_to_it(tmp_path: Path) -> None:
    written = write(tmp_path, 5, 10)
    assert store(tmp_path).newest() == written
    assert written.state.version == 10
    assert written.state.seed == SEED
    assert set(written.state.pickle_sha256) == {".metadata", "common.pt"}
    assert written.megatron == tmp_path / "checkpoints" / "step-000010" / "megatron"
    assert files(written.folder) == {*FILES, "state.json"}
    assert (tmp_path / "model").readlink() == Path("checkpoints/step-000010/hf")
    assert (tmp_path / "model" / "config.json").samefile(written.hf / "config.json")
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert (moved / "model" / "config.json").is_file(), "the link is relative"


def test_the_last_ones_are_kept_and_what_a_user_put_beside_them(tmp_path: Path) -> None:
    write(tmp_path, 1)
    mine = tmp_path / "checkpoints" / "step-000001-good"
    (tmp_path / "checkpoints" / "step-000001").rename(mine)
    write(tmp_path, 2, 3, 4)
    assert names(tmp_path) == ["step-000001-good", "step-000003", "step-000004"]
    assert store(tmp_path).newest().state.version == 4
    write(tmp_path, 5, keep_last=1)
    assert names(tmp_path) == ["step-000001-good", "step-000005"]


def test_versions_are_ordered_as_numbers(tmp_path: Path) -> None:
    write(tmp_path, 999_999, 1_000_000)
    assert store(tmp_path).newest().state.version == 1_000_000
    write(tmp_path, 1_000_001)
    assert names(tmp_path) == ["step-1000000", "step-1000001"]


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no complete checkpoint; start anew with another run\.dir"):
        store(tmp_path).newest()


@pytest.mark.parametrize("before", [(), (5,)])
def test_a_fill_that_fails_leaves_the_last_complete_one_and_the_next_cleans_up(
    tmp_path: Path, before: tuple[int, ...]
) -> None:
    async def half(megatron: Path, hf: Path) -> None:
        (megatron / "common.pt").write_text("half")
        raise Boom("disk full")

    async def main() -> None:
        await store(tmp_path).write(WeightVersion(10), half)

    last = write(tmp_path, *before) if before else None
    with pytest.raises(Boom):
        anyio.run(main)
    if last is None:
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            store(tmp_path).newest()
        assert not (tmp_path / "model").exists()
    else:
        assert store(tmp_path).newest() == last
        assert (tmp_path / "model").readlink() == Path("checkpoints/step-000005/hf")
    write(tmp_path, 11)
    assert names(tmp_path) == [*(f"step-{version:06d}" for version in before), "step-000011"]


CASES = [
    (step, when, times)
    for step in (
        "asyncrl.checkpoint._hash_pickles",
        "pathlib.Path.write_text",
        "asyncrl.checkpoint._sync_tree",
        "pathlib.Path.rename",
        "asyncrl.checkpoint._sync_folder",
        "pathlib.Path.symlink_to",
        "shutil.rmtree",
    )
    for when in ("before", "after")
    for times in (1, 2, 3, 4)
]


def test_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed right before or after the n-th time that any step is taken: what `newest` finds is whole.

    The process that writes version 4 beside 2 and 3 kills itself; keeping 2, it would remove version 2.
    """
    monkeypatch.setattr("os.fsync", lambda _: None)  # against a loss of power, not a kill
    command = [sys.executable, "-P", "-c", KILLED, str(tmp_path), json.dumps(CASES)]
    runs = [tmp_path / f"{case}" for case in range(len(CASES))]
    write(runs[0], 2, 3)
    for run in runs[1:]:
        shutil.copytree(runs[0], run, symlinks=True)
    ended = subprocess.run(command, timeout=120, check=True, capture_output=True)
    statuses = json.loads(ended.stdout)
    assert set(statuses) == {0, signal.SIGKILL}, "0: the step is not taken so often"
    found = []
    for run, case in zip(runs, CASES, strict=True):
        checkpoint = store(run).newest()
        found.append(checkpoint.state.version)
        assert files(checkpoint.folder) == {*FILES, "state.json"}, case
        made_as = {(checkpoint.folder / name).read_text().split(" of ")[1] for name in FILES}
        assert made_as == {f".partial-step-{checkpoint.state.version:06d}"}, "nothing of another version"
        assert (run / "model").resolve() == checkpoint.hf.resolve(), "newest mends the link"
        write(run, 5)
        assert names(run) == [f"step-{version:06d}" for version in (checkpoint.state.version, 5)], case
        assert {path.name for path in run.iterdir()} == {"checkpoints", "model"}
    assert set(found) == {3, 4}, found
    assert all(version == 4 for version, status in zip(found, statuses, strict=True) if status == 0)


KILLED = f"""
import importlib, json, os, pathlib, signal, sys
import anyio
from asyncrl.checkpoint import CheckpointStore

os.fsync = lambda _: None

async def fill(megatron, hf):
    for name in {sorted(FILES)!r}:
        with open(megatron.parent / name, "w") as file:
            file.write(f"{{name}} of {{megatron.parent.name}}")

def write(run, step, when, times):
    def deadly(*args, **kwargs):
        nonlocal times
        times -= 1
        if times == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*args, **kwargs)
        if times == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    module, _, name = step.rpartition(".")
    home = pathlib.Path if module == "pathlib.Path" else importlib.import_module(module)
    real = getattr(home, name)
    setattr(home, name, deadly)
    anyio.run(CheckpointStore(run, seed={SEED}, keep_last=2).write, 4, fill)

anyio.run(anyio.sleep, 0)  # import the backend once, not in every child
statuses = []
for number, case in enumerate(json.loads(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            write(pathlib.Path(sys.argv[1], str(number)), *case)
            status = 0
        finally:
            os._exit(status)
    statuses.append(os.waitpid(pid, 0)[1])
print(json.dumps(statuses))
"""


def test_the_loops_go_on_while_the_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def wait(folder: Path) -> None:
        anyio.from_thread.run_sync(seen.append, folder.name)  # returns when the event loop has had its turn

    monkeypatch.setattr("asyncrl.checkpoint._sync_tree", wait)
    write(tmp_path, 1)
    assert seen == [".partial-step-000001"]
    assert names(tmp_path) == ["step-000001"]


def test_a_version_of_a_lineage_that_was_left_is_replaced(tmp_path: Path) -> None:
    (write(tmp_path, 4).folder / "hf" / "left.safetensors").write_text("of the dead lineage")
    assert files(write(tmp_path, 4).folder) == {*FILES, "state.json"}
    assert names(tmp_path) == ["step-000004"]


def replace_pickle(folder: Path) -> None:
    (folder / "megatron" / "common.pt").write_bytes(b"cos\nsystem\n(S'id'\ntR.")


def remove_pickle(folder: Path) -> None:
    (folder / "megatron" / ".metadata").unlink()


def open_file(folder: Path) -> None:
    (folder / "megatron" / "__0_0.distcp").chmod(0o660)


def open_folder(folder: Path) -> None:
    (folder / "megatron").chmod(0o702)


def link_file(folder: Path) -> None:
    (folder / "hf" / "model.safetensors").unlink()
    (folder / "hf" / "model.safetensors").symlink_to("/dev/null")


def empty_state(folder: Path) -> None:
    (folder / "state.json").write_text("")


def list_state(folder: Path) -> None:
    (folder / "state.json").write_text("[]")


def short_state(folder: Path) -> None:
    (folder / "state.json").write_text('{"version": 7}')


def state_without_hashes(folder: Path) -> None:
    values = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(values | {"pickle_sha256": {}}))


def renamed(folder: Path) -> None:
    folder.rename(folder.with_name("step-000008"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (replace_pickle, r"common\.pt is not what the run wrote .* will not be loaded. Move that folder away"),
        (remove_pickle, r"\.metadata is not what the run wrote"),
        (state_without_hashes, r"\.metadata, common\.pt is not what the run wrote"),
        (open_file, r"__0_0\.distcp has mode -rw-rw----: .* chmod -R go-w .*step-000007$"),
        (open_folder, r"megatron has mode drwx----w-: others could"),
        (link_file, r"model\.safetensors is a symbolic link"),
        (empty_state, r"state\.json is broken \(JSONDecodeError.*Move that folder away"),
        (list_state, r"state\.json is broken \(TypeError"),
        (short_state, r"state\.json is broken \(KeyError: 'seed'\)"),
        (renamed, r"speaks of version 7: the folder was renamed"),
    ],
)
def test_what_somebody_may_have_changed_is_not_loaded(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    first = write(tmp_path, 6)
    spoil(write(tmp_path, 7).folder)
    with pytest.raises(CheckpointError, match=message):
        store(tmp_path).newest()
    (spoiled,) = [path for path in (tmp_path / "checkpoints").iterdir() if path != first.folder]
    spoiled.rename(tmp_path / "away")
    assert store(tmp_path).newest() == first, "the cure of the message works"


def test_the_cure_for_modes_works(tmp_path: Path) -> None:
    written = write(tmp_path, 7)
    open_file(written.folder)
    open_folder(written.folder)
    subprocess.run(["chmod", "-R", "go-w", str(written.folder)], check=True)
    assert store(tmp_path).newest() == written


def test_a_checkpoint_of_somebody_else_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = write(tmp_path, 7).folder.stat().st_uid
    monkeypatch.setattr("asyncrl.checkpoint.os.getuid", lambda: owner + 1)
    with pytest.raises(CheckpointError, match=rf"belongs to uid {owner}, not to you \({owner + 1}\); not loaded"):
        store(tmp_path).newest()


def test_a_run_of_another_seed_is_not_gone_on_with(tmp_path: Path) -> None:
    write(tmp_path, 7)
    with pytest.raises(CheckpointError, match=r"written with seed 3, the recipe says seed=4; resume with seed=3"):
        store(tmp_path, seed=4).newest()


def test_a_generous_umask_does_not_lock_the_user_out(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        written = write(tmp_path, 7)
    finally:
        os.umask(old_mask)
    assert store(tmp_path).newest() == written
    assert stat.S_IMODE((tmp_path / "checkpoints").stat().st_mode) == 0o700
