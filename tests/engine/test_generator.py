"""A replica's rules, over a strict fake engine: versions, the pump, errors, cancellation. On asyncio and trio."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest

from engine.generate_call import GeneratorError, VersionMismatch
from engine.generator import GeneratorSpec, GeneratorWorker
from engine.types import GenerateRequest, GenerateResult, Manifest, Sampling, WeightVersion
from engine.vllm_engine import EngineSpec, FinishedSample

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SAMPLING = Sampling(max_tokens=4, stop_token_ids=(2,))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker ignores Ctrl-C and freezes its garbage; here it runs in pytest's process."""
    monkeypatch.setattr("engine.generator._freeze_garbage", lambda: None)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@dataclass
class FakeEngine:
    """Draws `seed % 4 + 1` tokens, one a step, for at most `max_running` requests, lowest priority number first.

    The last token is 2 if there are fewer than 4. It refuses what a real engine would: unknown ids, ids twice.
    """

    max_running: int = 100
    fail_at_step: int | None = None
    fail_repack: bool = False
    logprob: float = -1.0
    finish_reason: str | None = None
    vocabulary_size: int = 20
    num_steps: int = 0
    waiting: list[tuple[int, int, str, int]] = field(default_factory=list)
    running: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)

    def params(self) -> Mapping[str, Any]:
        return {"w": np.zeros(2, np.float32), "v": np.zeros(1, np.float32)}

    def add(
        self,
        request_ids: Sequence[str],
        prompt_ids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        priority: int,
    ) -> None:
        assert sampling == SAMPLING
        if 666 in seeds:
            raise ValueError("the engine does not like this seed")

        for request_id, prompt, seed in zip(request_ids, prompt_ids, seeds, strict=True):
            assert prompt
            assert request_id not in self.known
            self.known.add(request_id)
            self.waiting.append((priority, len(self.known), request_id, seed))

    def step(self) -> list[FinishedSample]:
        assert self.waiting or self.running, "a step with nothing to do"
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("out of memory")

        self.waiting.sort()
        while self.waiting and len(self.running) < self.max_running:
            _, _, request_id, seed = self.waiting.pop(0)
            self.running[request_id] = (seed, [])
        finished: list[FinishedSample] = []
        for request_id, (seed, tokens) in list(self.running.items()):
            length = seed % 4 + 1
            tokens.append(2 if len(tokens) + 1 == length < 4 else 10 + len(tokens))
            if len(tokens) == length:
                del self.running[request_id]
                reason = self.finish_reason or ("stop" if length < 4 else "length")
                finished.append(FinishedSample(request_id, tokens, [self.logprob] * length, reason))
        return finished[::-1]

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            assert request_id in self.known
            self.running.pop(request_id, None)
            self.waiting = [entry for entry in self.waiting if entry[2] != request_id]

    def repack(self, touched: Iterable[str]) -> int:
        self.log.append(f"repack {sorted(touched)}")
        if self.fail_repack:
            raise RuntimeError("no memory to pack")
        return 1

    def reset_prefix_cache(self) -> None:
        assert not self.running
        self.log.append("reset")

    def close(self) -> None:
        self.log.append("close")


@dataclass
class FakeReceiver:
    """Applies what was prepared; fails before or after the first byte when told to."""

    fail: str = ""
    poisoned: bool = False
    prepared: Manifest | None = None
    closed: bool = False

    def prepare(self, manifest: Manifest) -> None:
        if self.fail == "prepare":
            raise RuntimeError("bucket 3 is missing")
        self.prepared = manifest

    def apply(self, manifest: Manifest) -> tuple[set[str], int]:
        assert manifest == self.prepared
        if self.fail == "before":
            raise RuntimeError("bucket 3 was overwritten")
        self.poisoned = self.fail == "half-way"
        if self.poisoned:
            raise RuntimeError("bucket 4 was overwritten")
        return {"w"}, 8

    def close(self) -> None:
        self.closed = True


async def started(
    engine: FakeEngine | None = None, receiver: FakeReceiver | None = None, *, loaded_version: int | None = 0
) -> GeneratorWorker:
    """A worker over fakes; nothing pumps yet."""
    version = None if loaded_version is None else WeightVersion(loaded_version)
    spec = GeneratorSpec(model_dir="none", max_model_len=8, loaded_version=version)

    def make_engine(engine_spec: EngineSpec) -> FakeEngine:
        assert engine_spec.max_model_len == 8
        return engine if engine is not None else FakeEngine()

    worker = GeneratorWorker(spec, make_engine)
    await worker.start()
    worker._receiver = receiver  # type: ignore[assignment] # a fake; attach would want shared memory
    return worker


@asynccontextmanager
async def pumping(worker: GeneratorWorker) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        yield
        await worker.stop()


@asynccontextmanager
async def under_way(worker: GeneratorWorker, *requests: GenerateRequest) -> AsyncIterator[list[GenerateResult]]:
    """Requests that are queued when the block begins and answered, in the order of their end, when it has ended."""
    results: list[GenerateResult] = []

    async def generate(wanted: GenerateRequest) -> None:
        results.append(await worker.generate(wanted))

    async with anyio.create_task_group() as tasks:
        for wanted in requests:
            tasks.start_soon(generate, wanted)
            await anyio.wait_all_tasks_blocked()
        yield results


def request(*seeds: int, version: int = 0, priority: int = 0, prompt: tuple[int, ...] = (5, 6)) -> GenerateRequest:
    return GenerateRequest(
        version=WeightVersion(version),
        prompt_ids=(prompt,) * len(seeds),
        seeds=seeds,
        sampling=SAMPLING,
        priority=priority,
    )


def manifest(version: int) -> Manifest:
    number = WeightVersion(version)
    return Manifest(epoch=0, version=number, written_version=number, plan_hash="p", slot=0, digests={0: "d"})


async def publish(worker: GeneratorWorker, version: int) -> None:
    await worker.prepare(manifest(version))
    report = await worker.flip(manifest(version))
    assert (report.version, report.num_bytes) == (version, 8)


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


async def test_honest_version_labels() -> None:
    worker = await started(receiver=FakeReceiver(), loaded_version=None)
    async with pumping(worker):
        for version in (0, 1, 2):
            await publish(worker, version)
            result = await worker.generate(request(3, 3, version=version))
            assert result.versions.tolist() == [version] * 8


async def test_another_version_is_refused_and_both_are_named() -> None:
    with pytest.raises(VersionMismatch, match="serves version 4, version 5 was asked for"):
        await (await started(loaded_version=4)).generate(request(1, version=5))

    with pytest.raises(VersionMismatch, match="has no version yet, version 0 was asked for"):
        await (await started(loaded_version=None)).generate(request(1))


async def test_a_flip_is_refused_while_requests_run() -> None:
    engine = FakeEngine()
    worker = await started(engine, FakeReceiver())
    await worker.prepare(manifest(1))
    async with under_way(worker, request(3, 1)) as results:
        with pytest.raises(GeneratorError, match="cannot flip to version 1: 2 samples of version 0 are under way"):
            await worker.flip(manifest(1))

        assert engine.log == []
        async with pumping(worker):
            while not results:
                await anyio.wait_all_tasks_blocked()
            await worker.flip(manifest(1))
    assert results[0].versions.tolist() == [0] * 6
    assert engine.log == ["repack ['w']", "reset", "close"]


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


@pytest.mark.parametrize("fail", ["half-way", "repack"])
async def test_whole_versions(fail: str) -> None:
    """A flip that failed after its first byte serves nothing until a whole version is applied."""
    engine, receiver = FakeEngine(fail_repack=fail == "repack"), FakeReceiver(fail=fail)
    worker = await started(engine, receiver)
    with pytest.raises(RuntimeError, match=r"overwritten|no memory"):
        await publish(worker, 1)

    for version in (0, 1):
        with pytest.raises(GeneratorError, match=f"cannot serve version {version}: the flip to version 1 failed"):
            await worker.generate(request(1, version=version))

    receiver.fail, engine.fail_repack = "", False
    engine.log.clear()
    await publish(worker, 2)
    assert engine.log == ["repack ['v', 'w']", "reset"]  # all of it: nobody knows what was packed from what
    async with pumping(worker):
        assert (await worker.generate(request(1, version=2))).versions.tolist() == [2, 2]


@pytest.mark.parametrize("fail", ["prepare", "before"])
async def test_a_failure_before_the_first_byte_leaves_the_old_version_serving(fail: str) -> None:
    worker = await started(receiver=FakeReceiver(fail=fail))
    with pytest.raises(RuntimeError, match="bucket 3"):
        await publish(worker, 1)

    async with pumping(worker):
        assert (await worker.generate(request(1, version=0))).versions.tolist() == [0, 0]


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
