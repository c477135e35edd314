"""What a worker does to its own process: keep to its cores, leave Ctrl-C to the driver, say how much memory it took."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

_TASKS = Path("/proc/self/task")


def pin_threads(cpus: Collection[int]) -> None:
    """Bind every thread of this process to the cores `cpus`; threads started later inherit it.

    Call it first and again after libraries have started: some threads were made by threads bound elsewhere.

    Raises:
        ValueError: no core, or one that this machine or container does not give us.
    """
    wanted = set(cpus)
    before = os.sched_getaffinity(0)
    for task in _TASKS.iterdir():
        try:
            os.sched_setaffinity(int(task.name), wanted)
            bound = os.sched_getaffinity(int(task.name))  # the kernel leaves out what it does not give, silently
        except ProcessLookupError:
            continue  # the thread has ended since
        except OSError:
            bound = set()
        if not wanted or bound != wanted:
            raise ValueError(f"cpus {sorted(wanted)} cannot be used: this process may use {sorted(before)}")


def ignore_interrupt() -> None:
    """Ignore SIGINT: a Ctrl-C reaches every process of the terminal, and it is the driver that ends its workers.

    Signal handlers belong to the main thread; from another one this does nothing (Ray starts workers with SIGINT
    blocked in any case).
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_memory_bytes_of(pid: int) -> int:
    """Largest resident memory of another process so far; 0 if there is no such process any more."""
    try:
        status = Path("/proc", str(pid), "status").read_text()
    except OSError:
        return 0

    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found is not None else 0  # a zombie has none


def divide_cores(cores: Sequence[int], num_workers: int, num_threads: int) -> tuple[tuple[int, ...], ...]:
    """Return each worker's cores: its own slice if that has a core for each of its threads, otherwise all of them.

    Example: cores (4, 5, 6) for 3 workers of 1 thread are ((4,), (5,), (6,)); for 2 workers of 2 threads both get all.
    """
    share = len(cores) // num_workers
    if share < num_threads:
        return (tuple(cores),) * num_workers

    return tuple(tuple(cores[worker * share : (worker + 1) * share]) for worker in range(num_workers))
