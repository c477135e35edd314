"""The tiers of tests and their time budgets, and the check that a session leaves nothing behind.

`pytest --tier default` (`make test`) and `--tier slow` (`make test-slow`) select by marker, print the time they took of
their budget, and fail when it is over. Every session fails if a process that it started, or shared memory of a run,
is still there at its end.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import psutil
import pytest

_START = time.monotonic()
_SESSION_VARIABLE = "ASYNCRL_TEST_SESSION"  # inherited by every process of the session, also by Ray's daemons
_SHARED_MEMORY = Path("/dev/shm")
_DYING_S = 10.0  # Ray's daemons need a moment after the driver has said goodbye
_PYTHON_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # end with their parent

# No test asks a hub for a model or data: what it needs it makes itself.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Examples are the same in every CI run; on a developer's machine every run looks at new ones. No deadline per example:
# machines are shared.
hypothesis.settings.register_profile("developer", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "developer")


@dataclass(frozen=True, slots=True)
class Tier:
    """Which tests belong together (a marker expression of pytest) and how many seconds they may take on 2 cores."""

    markers: str
    budget_s: float


TIERS = {
    "default": Tier("not slow and not gpu", 20 * 60),
    "slow": Tier("slow and not gpu", 35 * 60),
    "gpu": Tier("gpu", 10 * 60),
}


@dataclass(slots=True)
class _Watch:
    """What the session must answer for at its end."""

    tier: str | None
    token: str
    folders_before: frozenset[Path]
    complaints: tuple[str, ...] = ()

    def over_budget(self) -> str | None:
        """Return the complaint if the tier has used more than its budget."""
        if self.tier is None or time.monotonic() - _START <= TIERS[self.tier].budget_s:
            return None

        return f"tier {self.tier} is over its budget of {TIERS[self.tier].budget_s:.0f} s: make tests cheaper, or slow"


_WATCH = pytest.StashKey[_Watch]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tier`."""
    parser.addoption("--tier", choices=sorted(TIERS), help="run one tier of tests, within its time budget")


def pytest_configure(config: pytest.Config) -> None:
    """Select the tier by its markers and start to watch."""
    tier = config.getoption("--tier")
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    os.environ[_SESSION_VARIABLE] = token
    config.stash[_WATCH] = _Watch(tier, token, frozenset(_run_folders()))
    if tier is None:
        return

    if config.option.markexpr:
        raise pytest.UsageError(f"--tier {tier} and -m {config.option.markexpr!r} both select by marker: give one")

    config.option.markexpr = TIERS[tier].markers
    if config.option.durations is None:
        config.option.durations = 10  # where the budget went


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; the marker must say what it needs one for."""
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu")) is not None]
    for item, mark in marked:
        if not mark.kwargs.get("reason"):
            raise pytest.UsageError(
                f"{item.nodeid}: write @pytest.mark.gpu(reason=...), what is the device needed for?"
            )

    if marked and not _has_cuda():
        for item, mark in marked:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {mark.kwargs['reason']}"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End the session after the test in which the budget ran out."""
    complaint = item.config.stash[_WATCH].over_budget()
    if complaint is not None:
        item.session.shouldfail = complaint


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if it is over budget or leaves something behind."""
    watch = session.config.stash[_WATCH]
    budget = watch.over_budget()
    watch.complaints = (*((budget,) if budget else ()), *_left_processes(watch.token), *_left_folders(watch))
    if watch.complaints and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the tier took of its budget, and the complaints."""
    watch = config.stash[_WATCH]
    if watch.tier is not None:
        took_s, budget_s = time.monotonic() - _START, TIERS[watch.tier].budget_s
        terminalreporter.write_line(f"tier {watch.tier}: {took_s:.0f} s of {budget_s:.0f} s")

    for complaint in watch.complaints:
        terminalreporter.write_line(f"SESSION FAILED: {complaint}", red=True)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _run_folders() -> list[Path]:
    """Return the shared-memory folders of this user's runs (DESIGN section 6)."""
    return list(_SHARED_MEMORY.glob(f"asyncrl-{os.getuid()}-*"))


def _left_folders(watch: _Watch) -> list[str]:
    """Return a complaint for every run folder that appeared in this session and is not another session's."""
    new = [folder for folder in _run_folders() if folder not in watch.folders_before]
    ours = {os.getpid(), *(process.pid for process in _session_processes(watch.token))}
    return [f"left in shared memory: {folder}" for folder in new if folder.exists() and not _holders(folder) - ours]


def _holders(folder: Path) -> set[int]:
    """Return the processes that have a file of `folder` open (the run's lock) or mapped (its segments)."""
    found = set()
    for process in psutil.process_iter():
        try:
            paths = [*(file.path for file in process.open_files()), *(each.path for each in process.memory_maps())]
        except psutil.Error:  # ended meanwhile, or somebody else's
            continue

        if any(Path(path).is_relative_to(folder) for path in paths):
            found.add(process.pid)

    return found


def _left_processes(token: str) -> list[str]:
    """Return a complaint for every process that inherited this session's variable and does not end within a moment."""
    _, alive = psutil.wait_procs(_session_processes(token), timeout=_DYING_S)
    return [f"left running: process {process.pid}: {_command(process)}" for process in alive]


def _session_processes(token: str) -> list[psutil.Process]:
    """Return our descendants (a forked one shows an old environment) and who has the variable (daemons left us)."""
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.environ().get(_SESSION_VARIABLE) == token:
                found[process.pid] = process
        except psutil.Error:  # ended meanwhile, or somebody else's
            continue

    found.pop(os.getpid(), None)
    return [process for process in found.values() if not any(name in _command(process) for name in _PYTHON_HELPERS)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "(ended)"
