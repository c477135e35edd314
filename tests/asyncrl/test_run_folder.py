"""The run's folder: private, one run, one process at a time, and what a death in between leaves."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.run_folder import RECIPE, RUN_ID, RunFolder, RunFolderError

HOLD = """
import sys, time
from pathlib import Path
from asyncrl.run_folder import RunFolder
folder = RunFolder.reopen(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def new_run(path: Path) -> Path:
    RunFolder.create(path, "seed: 0\n").close()
    return path


def test_a_new_folder_holds_the_recipe_and_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        with RunFolder.create(tmp_path / "runs" / "a", "seed: 7\n") as folder:
            assert folder.path == tmp_path / "runs" / "a"
            assert (folder.path / RECIPE).read_text() == "seed: 7\n"
    finally:
        os.umask(old_mask)
    assert mode(folder.path) == 0o700
    assert {mode(path) for path in folder.path.iterdir()} == {0o600}


def test_an_empty_folder_of_ones_own_is_taken_and_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    assert mode(new_run(tmp_path / "a")) == 0o700


def test_a_folder_that_was_opened_up_is_closed_again_by_a_resume(tmp_path: Path) -> None:
    path = new_run(tmp_path / "a")
    path.chmod(0o777)
    RunFolder.reopen(path).close()
    assert mode(path) == 0o700


def test_a_run_is_not_started_twice_and_the_cure_is_named(tmp_path: Path) -> None:
    path = new_run(tmp_path / "a")
    (path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match=rf"holds a run already: `--resume {path}`, or another run.dir"):
        RunFolder.create(path, "seed: 1\n")
    assert (path / RECIPE).read_text() == "seed: 0\n"


def test_a_run_that_never_came_to_its_first_step_is_begun_again(tmp_path: Path) -> None:
    path = new_run(tmp_path / "a")
    (path / "metrics.jsonl").touch()
    (path / "wandb").mkdir()
    (path / "model_init").symlink_to(tmp_path)
    name = (path / RUN_ID).read_text()
    RunFolder.create(path, "seed: 1\n").close()
    assert (path / RECIPE).read_text() == "seed: 1\n"
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", RECIPE, RUN_ID]
    assert (path / RUN_ID).read_text() == name
    assert tmp_path.exists(), "the link went, not what it points at"


def test_a_run_with_a_checkpoint_is_not_begun_again(tmp_path: Path) -> None:
    path = new_run(tmp_path / "a")
    (path / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="holds a run already"):
        RunFolder.create(path, "seed: 1\n")


def test_a_folder_with_something_else_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    tmp_path.chmod(0o755)
    with pytest.raises(RunFolderError, match=r"not empty \(thesis.tex\) and holds no run; name another folder"):
        RunFolder.create(tmp_path, "")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert mode(tmp_path) == 0o755


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(RunFolderError, match="File exists; name another folder"):
        RunFolder.create(tmp_path / "a", "")
    with pytest.raises(RunFolderError, match="Not a directory; name another folder"):
        RunFolder.create(tmp_path / "a" / "b", "")


def test_no_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no run \(recipe.yaml is missing\)"):
        RunFolder.reopen(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="there is no run"):
        RunFolder.reopen(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with RunFolder.create(path, "") as first:
        with pytest.raises(RunFolderError, match="in use by another process"):
            RunFolder.reopen(path)
        first.close()
        RunFolder.reopen(path).close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_lock_goes_with_its_process(tmp_path: Path, number: signal.Signals) -> None:
    path = new_run(tmp_path / "a")
    holder = subprocess.Popen([sys.executable, "-P", "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunFolderError, match="in use by another process"):
            RunFolder.reopen(path)
    finally:
        holder.send_signal(number)
        holder.communicate()
    RunFolder.reopen(path).close()


def test_a_lock_is_not_inherited(tmp_path: Path) -> None:
    """A worker that outlives the driver must not keep the run's folder."""
    folder = RunFolder.create(tmp_path / "a", "")
    child = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        folder.close()
        RunFolder.reopen(tmp_path / "a").close()
    finally:
        child.kill()
        child.wait()


def refusals(tmp_path: Path) -> list[Callable[[], RunFolder]]:
    run = new_run(tmp_path / "run")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / ".lock").symlink_to(tmp_path / "elsewhere")
    (run / "metrics.jsonl").write_text("{}\n")
    return [
        lambda: RunFolder.create(run, ""),
        lambda: RunFolder.create(linked, ""),
        lambda: RunFolder.reopen(tmp_path),
    ]


def test_a_refusal_leaks_no_descriptor(tmp_path: Path) -> None:
    for refused in refusals(tmp_path):
        before = open_descriptors()
        with pytest.raises(RunFolderError):
            refused()
        assert open_descriptors() == before
    assert not (tmp_path / "elsewhere").exists()


def test_a_busy_folder_leaks_no_descriptor(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "a", ""):
        before = open_descriptors()
        with pytest.raises(RunFolderError):
            RunFolder.reopen(tmp_path / "a")
        assert open_descriptors() == before


def test_closing_twice_closes_nobody_elses_descriptor(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a", "")
    folder.close()
    with (tmp_path / "other").open("w") as other:  # takes the number that became free
        folder.close()
        other.write("still open")
    assert (tmp_path / "other").read_text() == "still open"


@pytest.mark.parametrize("fails_at", ["asyncrl.run_folder._write_private", "pathlib.Path.rename"])
def test_a_creation_that_failed_can_be_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """Disk full, or killed: what is there is not yet a run, and the same command works the next time."""
    path = tmp_path / "a"
    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(fails_at, broken)
        with pytest.raises(OSError, match="disk full"):
            RunFolder.create(path, "seed: 0\n")
    assert open_descriptors() == before
    with pytest.raises(RunFolderError, match="there is no run"):
        RunFolder.reopen(path)
    assert (new_run(path) / RECIPE).read_text() == "seed: 0\n"
    assert {entry.name for entry in path.iterdir()} == {RECIPE, RUN_ID, ".lock"}


def broken(*_: object, **__: object) -> None:
    raise OSError("disk full")


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, empty = new_run(tmp_path / "run"), tmp_path / "empty"
    empty.mkdir()
    for path in (run, empty):
        path.chmod(0o755)
    owner = run.stat().st_uid
    monkeypatch.setattr("asyncrl.run_folder.os.getuid", lambda: owner + 1)
    message = rf"belongs to uid {owner}, not to you \({owner + 1}\); name a folder of your own"
    with pytest.raises(RunFolderError, match=message):
        RunFolder.create(empty, "")
    with pytest.raises(RunFolderError, match=message):
        RunFolder.reopen(run)
    assert (mode(run), mode(empty)) == (0o755, 0o755)


def test_the_run_id_stays_through_moves_and_chmods_and_differs_between_runs(tmp_path: Path) -> None:
    path = new_run(tmp_path / "a")
    run_id = (path / RUN_ID).read_text()
    assert len(run_id) == 10
    (path / RECIPE).chmod(0o400)
    path = path.rename(tmp_path / "b")
    RunFolder.reopen(path).close()
    assert (path / RUN_ID).read_text() == run_id
    assert (new_run(tmp_path / "a") / RUN_ID).read_text() != run_id


def test_a_run_that_lost_its_id_gets_one(tmp_path: Path) -> None:
    path = new_run(tmp_path / "a")
    (path / RUN_ID).unlink()
    RunFolder.reopen(path).close()
    assert len((path / RUN_ID).read_text()) == 10
