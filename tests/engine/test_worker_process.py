"""What a worker does to its own process, against a kernel that gives it cores 0 and 2 only."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

import pytest

from engine.worker_process import divide_cores, peak_memory_bytes, peak_memory_bytes_of, pin_threads

GIVEN = {0, 2}


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Thread id -> the cores that it was bound to; the tests' own threads stay where they are."""
    threads: dict[int, set[int]] = {}

    def set_affinity(thread: int, cpus: Iterable[int]) -> None:
        if not GIVEN.intersection(cpus):
            raise OSError(errno.EINVAL, "Invalid argument")

        threads[thread] = GIVEN.intersection(cpus)  # as the kernel does, without a word

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: threads.get(thread, GIVEN))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return threads


def test_every_thread_is_bound_also_to_a_core_with_a_high_number(bound: dict[int, set[int]]) -> None:
    pin_threads((2,))
    assert os.getpid() in bound
    assert all(cores == {2} for cores in bound.values())


@pytest.mark.parametrize("cpus", [(), (1,), (0, 1)])
@pytest.mark.usefixtures("bound")
def test_a_core_that_the_kernel_does_not_give_is_named(cpus: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"cpus .* cannot be used: this process may use \[0, 2\]"):
        pin_threads(cpus)


@pytest.mark.parametrize(
    ("cores", "num_workers", "num_threads", "expected"),
    [
        ((4, 5, 6), 3, 1, ((4,), (5,), (6,))),
        ((4, 5, 6), 2, 1, ((4,), (5,))),
        ((4, 5, 6), 2, 2, ((4, 5, 6), (4, 5, 6))),
        ((4,), 2, 1, ((4,), (4,))),
    ],
)
def test_cores_are_divided_if_there_are_enough(
    cores: tuple[int, ...], num_workers: int, num_threads: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert divide_cores(cores, num_workers, num_threads) == expected


def test_the_peak_of_another_process() -> None:
    assert peak_memory_bytes_of(os.getpid()) == pytest.approx(peak_memory_bytes(), rel=0.05)
    assert peak_memory_bytes_of(2**22 + 1) == 0  # beyond the largest process id
