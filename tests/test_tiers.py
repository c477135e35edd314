"""tests/conftest.py itself: tiers select, budgets are printed and enforced, what is left behind fails the session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py").read_text()
TESTS = """
import pytest

def test_quick(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.gpu(reason="to compare with the CPU")
def test_gpu(): pass
"""
CONFIGURATION = """
[pytest]
addopts = --strict-markers -p no:cacheprovider -v
markers =
    slow: second tier
    gpu: needs a device
"""


def run_session(folder: Path, *arguments: str, tests: str = TESTS, appended: str = "") -> tuple[int, str]:
    """Run pytest on `tests` under a copy of our conftest; return exit status and output."""
    (folder / "conftest.py").write_text(CONFTEST + appended)
    (folder / "pytest.ini").write_text(CONFIGURATION)
    (folder / "test_it.py").write_text(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("tier", "test", "budget_s"), [("default", "test_quick", 1200), ("slow", "test_slow", 2100)])
def test_tier_selects_and_prints_its_budget(tmp_path: Path, tier: str, test: str, budget_s: int) -> None:
    status, output = run_session(tmp_path, "--tier", tier)
    assert status == 0, output
    assert f"::{test} PASSED" in output
    assert "1 passed, 2 deselected" in output
    assert f"s of {budget_s} s" in output
    assert f"tier {tier}: " in output


def test_tier_over_budget_fails_and_ends_early(tmp_path: Path) -> None:
    slow = "import time\ndef test_first(): time.sleep(0.3)\ndef test_second(): pass\n"
    appended = "\nTIERS['default'] = Tier('not slow', 0.1)\n"
    status, output = run_session(tmp_path, "--tier", "default", tests=slow, appended=appended)
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "SESSION FAILED: tier default is over its budget" in output
    assert "test_second" not in output


def test_tier_and_marker_expression_do_not_mix(tmp_path: Path) -> None:
    status, output = run_session(tmp_path, "--tier", "default", "-m", "slow")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "give one" in output


def test_gpu_marker_needs_a_reason(tmp_path: Path) -> None:
    status, output = run_session(tmp_path, tests="import pytest\n@pytest.mark.gpu\ndef test_it(): pass\n")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "what is the device needed for?" in output


def test_left_process_fails_the_session(tmp_path: Path) -> None:
    leak = """
import subprocess, sys
def test_it():
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)']).pid)"
    with open("pid", "w") as pid:  # of the grandchild, that has lost its parent, as Ray's daemons do
        subprocess.run([sys.executable, "-c", code], check=True, stdout=pid)
"""
    status, output = run_session(tmp_path, tests=leak, appended="\n_DYING_S = 0.2\n")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "1 passed" in output
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "SESSION FAILED: left running: process" in output
    assert "time.sleep(20)" in output


@pytest.mark.parametrize("held_by", ["nobody", "the session", "another run"])
def test_left_shared_memory_fails_the_session(tmp_path: Path, held_by: str) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    folder = shared / f"asyncrl-{os.getuid()}-some_run"
    tests = f"""
import fcntl, pathlib, subprocess, sys, warnings
import conftest
def test_it():
    folder = pathlib.Path({str(folder)!r})
    folder.mkdir()
    lock = folder / "run.lock"
    lock.touch()
    if {held_by!r} == "the session":
        conftest.held = lock.open("rb+")
        fcntl.flock(conftest.held, fcntl.LOCK_EX)
    if {held_by!r} == "another run":
        code = "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)"
        code += "; print(flush=True); time.sleep(20)"
        conftest.other = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, env={{}})
        conftest.other.stdout.readline()
        pathlib.Path("pid").write_text(str(conftest.other.pid))
"""
    appended = f"\n_SHARED_MEMORY = Path({str(shared)!r})\n_DYING_S = 0.2\n"
    appended += "\n_session_processes = lambda token: []\n"  # the other run is no process of this session
    status, output = run_session(tmp_path, tests=tests, appended=appended)
    if held_by == "another run":
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    assert "1 passed" in output
    assert status == (0 if held_by == "another run" else pytest.ExitCode.TESTS_FAILED), output
    assert (f"left in shared memory: {folder}" in output) == (held_by != "another run")
