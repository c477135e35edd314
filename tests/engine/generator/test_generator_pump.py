"""A replica's pump, over a strict fake engine: requests, errors, cancellation. On asyncio and trio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import numpy as np
import pytest
from generator_fakes import FakeEngine, FakeReceiver, manifest, pumping, request, started, under_way

from engine.generate_call import GeneratorError, VersionMismatch
from engine.types import GenerateRequest

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("this_process_stays_as_it_was"), pytest.mark.timeout(60)]


async def test_samples_come_back_in_the_requests_order() -> None:
    worker = await started()
    async with pumping(worker):
        result = await worker.generate(request(3, 0, 1))
    assert result.lengths.tolist() == [4, 1, 2]
    assert result.token_ids.tolist() == [10, 11, 12, 13, 2, 10, 2]
    assert result.logprobs.tolist() == [-1.0] * 7
    assert result.finish_reasons == ("length", "stop", "stop")
    assert result.token_ids.dtype == result.lengths.dtype == result.versions.dtype == np.int32
    assert result.logprobs.dtype == np.float32
    assert result.busy_s > 0.0


async def test_other_calls_get_their_turn_between_two_steps() -> None:
    engine = FakeEngine()
    worker = await started(engine, FakeReceiver())
    seen: list[int] = []

    async def others() -> None:
        await worker.prepare(manifest(1))
        await worker.report()
        seen.append(engine.num_steps)
        await worker.generate(request(0))
        seen.append(engine.num_steps)

    async with pumping(worker), anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        await worker.generate(request(3, 3))
        assert len(seen) == 2
        assert seen[-1] < 4 == engine.num_steps


async def test_an_engine_that_fails_ends_run_and_every_call() -> None:
    worker = await started(FakeEngine(fail_at_step=2))
    errors: list[str] = []

    async def failing(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(GeneratorError) as caught:
            await call()
        errors.append(str(caught.value))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(failing, lambda: worker.generate(request(3, 0)))
        tasks.start_soon(failing, lambda: worker.generate(request(3, priority=1)))
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(failing, worker.run)

    reason = "generator-0: its engine failed: RuntimeError: out of memory"
    assert sorted(errors) == [
        reason,
        f"{reason}, with 1 of 1 samples of version 0 under way",
        f"{reason}, with 1 of 2 samples of version 0 under way",
    ]
    with pytest.raises(GeneratorError, match="serves nothing any more: its engine failed"):
        await worker.generate(request(1))

    await worker.stop()


async def test_stop_ends_calls_that_are_under_way() -> None:
    engine, receiver = FakeEngine(), FakeReceiver()
    worker = await started(engine, receiver)

    async def generate() -> None:
        with pytest.raises(GeneratorError, match="it was stopped, with 3 of 3 samples of version 0 under way"):
            await worker.generate(request(3, 3, 3))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await anyio.wait_all_tasks_blocked()
        await worker.stop()

    assert engine.log == ["close"]
    assert receiver.closed
    await worker.stop()  # idempotent


async def test_a_cancelled_call_leaves_the_engine() -> None:
    engine = FakeEngine()
    worker = await started(engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.generate, request(3, 3))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert not engine.waiting
    async with pumping(worker):
        assert (await worker.generate(request(0))).lengths.tolist() == [1]


async def test_evaluation_waits_behind_training() -> None:
    worker = await started(FakeEngine(max_running=2))
    evaluation, training = request(3, 3, priority=1), request(3, 3, 3, 3)
    async with under_way(worker, evaluation, training) as results, pumping(worker):
        while len(results) < 2:
            await anyio.wait_all_tasks_blocked()
    assert [len(result.lengths) for result in results] == [4, 2]


async def test_an_empty_request_has_an_empty_answer() -> None:
    worker = await started()
    result = await worker.generate(request())
    assert (len(result.token_ids), len(result.lengths), result.finish_reasons) == (0, 0, ())
    with pytest.raises(VersionMismatch):
        await worker.generate(request(version=3))


@pytest.mark.parametrize("wanted", [request(1, prompt=(5, 20)), request(1, 666)])
async def test_a_refused_request_leaves_nothing_behind(wanted: GenerateRequest) -> None:
    worker = await started()
    with pytest.raises(ValueError, match=r"token ids from 5 to 20|does not like this seed"):
        await worker.generate(wanted)

    async with pumping(worker):
        await worker.generate(request(1))


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
async def test_loud_failure_of_broken_weights(logprob: float) -> None:
    worker = await started(FakeEngine(logprob=logprob))
    async with pumping(worker):
        with pytest.raises(GeneratorError, match="version 0 gives logprobs that are not finite"):
            await worker.generate(request(1))


async def test_a_run_that_was_stopped_before_it_began_ends_at_once() -> None:
    worker = await started()
    await worker.stop()
    await worker.run()
    with pytest.raises(GeneratorError, match="it was stopped"):
        await worker.generate(request(0))


async def test_an_unknown_finish_reason_is_an_error() -> None:
    worker = await started(FakeEngine(finish_reason="repetition"))

    async def generate() -> None:
        with pytest.raises(GeneratorError, match="ended with 'repetition'"):
            await worker.generate(request(0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(GeneratorError, match="ended with 'repetition'"):
            await worker.run()


async def test_busy_time_is_shared_by_the_calls_under_way() -> None:
    worker = await started()
    async with under_way(worker, request(3, 3, 3), request(3)) as results, pumping(worker):
        while len(results) < 2:
            await anyio.wait_all_tasks_blocked()
        report = await worker.report()
    assert sum(result.busy_s for result in results) == pytest.approx(report.busy_s)
    assert report.peak_memory_bytes > 1 << 20


async def test_a_part_of_the_engine_that_dies_ends_run_while_there_is_nothing_to_do() -> None:
    engine = FakeEngine()
    worker = await started(engine)

    async def run() -> None:
        with pytest.raises(GeneratorError, match="its engine failed: RuntimeError: tensor-parallel rank 1 died"):
            await worker.run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        engine.death.set()

    with pytest.raises(GeneratorError, match=r"serves nothing any more: its engine failed: .* rank 1 died"):
        await worker.generate(request(0))
