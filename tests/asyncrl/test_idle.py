"""The busy clock: shares and overlap, by hand, against a brute-force count, and on trio's virtual clock."""

from __future__ import annotations

from contextlib import AbstractContextManager

import anyio
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.idle import BusyClock, IdleShares


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_example_of_the_docstring() -> None:
    clock = HandClock()
    busy = BusyClock(clock)
    busy.start()
    with busy.busy("trainer"):
        clock.now += 2
        generating = busy.busy("generator")
        generating.__enter__()
        clock.now += 4
    clock.now += 4
    generating.__exit__(None, None, None)

    total = busy.total()
    assert total == IdleShares(wall_s=10, trainer_busy_s=6, generator_busy_s=8, overlap_s=4)
    assert total.trainer_idle == pytest.approx(0.4)
    assert total.generator_idle == pytest.approx(0.2)
    assert total.overlap == pytest.approx(0.4)
    assert (total.trainer_wait_s, total.generator_wait_s) == (4, 2)


def test_start_up_does_not_count_and_work_under_way_counts_from_start() -> None:
    clock = HandClock()
    busy = BusyClock(clock)
    with busy.busy("generator"):
        clock.now += 50
        assert busy.total().wall_s == 0
        assert busy.total().generator_idle is None
        busy.start()
        clock.now += 3
        busy.start()  # a second one changes nothing

    clock.now += 1
    assert busy.total() == IdleShares(wall_s=4, trainer_busy_s=0, generator_busy_s=3, overlap_s=0)


def test_laps_are_disjoint_and_add_up_to_the_total() -> None:
    clock = HandClock()
    busy = BusyClock(clock)
    busy.start()
    with busy.busy("trainer"):
        clock.now += 1
        first = busy.lap()
        clock.now += 1
    clock.now += 2
    second = busy.lap()
    empty = busy.lap()

    assert first.trainer_idle == 0.0
    assert second.trainer_idle == pytest.approx(2 / 3)
    assert empty.trainer_idle is None
    assert first.wall_s + second.wall_s == busy.total().wall_s == 4


def test_a_member_with_two_pieces_of_work_is_busy_once() -> None:
    clock = HandClock()
    busy = BusyClock(clock)
    busy.start()
    with busy.busy("generator"):
        clock.now += 1
        with busy.busy("generator"):
            clock.now += 1
        clock.now += 1

    assert busy.total().generator_busy_s == 3


def test_idle_of_several_replicas_is_their_mean_and_one_of_them_is_enough_to_overlap() -> None:
    clock = HandClock()
    busy = BusyClock(clock, num_replicas=2)
    busy.start()
    with busy.busy("trainer"), busy.busy("generator", 1):
        clock.now += 5

    total = busy.total()
    assert total.generator_idle == pytest.approx(0.5)
    assert total.overlap == pytest.approx(1.0)


def test_work_that_raises_is_over() -> None:
    clock = HandClock()
    busy = BusyClock(clock)
    busy.start()

    def work() -> None:
        with busy.busy("trainer"):
            clock.now += 1
            raise RuntimeError("reward")

    with pytest.raises(RuntimeError, match="reward"):
        work()
    clock.now += 1
    assert busy.total().trainer_idle == pytest.approx(0.5)


def test_no_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="num_replicas must be >= 1, got 0"):
        BusyClock(HandClock(), num_replicas=0)


_INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=8)


@given(trainer=_INTERVALS, replicas=st.lists(_INTERVALS, min_size=1, max_size=3), start=st.integers(0, 20))
def test_agrees_with_counting_every_second(
    trainer: list[tuple[int, int]], replicas: list[list[tuple[int, int]]], start: int
) -> None:
    horizon = 60
    members = {("trainer", 0): trainer} | {("generator", i): work for i, work in enumerate(replicas)}

    clock = HandClock()
    clock.now = 0.0
    busy = BusyClock(clock, num_replicas=len(replicas))
    open_blocks: dict[tuple[str, int, int], AbstractContextManager[None]] = {}
    for second in range(horizon):
        clock.now = float(second)
        if second == start:
            busy.start()
        for (side, member), work in members.items():
            for number, (begin, length) in enumerate(work):
                if second == begin + length:
                    open_blocks.pop((side, member, number)).__exit__(None, None, None)
                if second == begin:
                    block = busy.busy(side, member)  # type: ignore[arg-type]
                    block.__enter__()
                    open_blocks[side, member, number] = block
    clock.now = float(horizon)

    def is_busy(work: list[tuple[int, int]], second: int) -> bool:
        return any(begin <= second < begin + length for begin, length in work)

    seconds = range(start, horizon)
    any_replica = [any(is_busy(work, second) for work in replicas) for second in seconds]
    assert busy.total() == IdleShares(
        wall_s=horizon - start,
        trainer_busy_s=sum(is_busy(trainer, second) for second in seconds),
        generator_busy_s=sum(is_busy(work, second) for work in replicas for second in seconds) / len(replicas),
        overlap_s=sum(
            generating and is_busy(trainer, second) for generating, second in zip(any_replica, seconds, strict=True)
        ),
    )


def test_runs_on_trios_virtual_clock() -> None:
    async def main() -> IdleShares:
        busy = BusyClock(anyio.current_time)
        busy.start()

        async def work(side: str, delay_s: float, duration_s: float) -> None:
            await anyio.sleep(delay_s)
            with busy.busy(side):  # type: ignore[arg-type]
                await anyio.sleep(duration_s)

        async with anyio.create_task_group() as group:
            group.start_soon(work, "trainer", 0, 3600)
            group.start_soon(work, "generator", 1800, 5400)
        return busy.total()

    total = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert total.wall_s == pytest.approx(7200)
    assert total.overlap == pytest.approx(0.25)
    assert total.trainer_idle == pytest.approx(0.5)
    assert total.generator_idle == pytest.approx(0.25)
