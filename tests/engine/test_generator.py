"""A replica's rules, over a strict fake engine: versions, the pump, errors, cancellation. On asyncio and trio."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest

from engine.generate_call import GeneratorError, VersionMismatch
from engine.generator import GeneratorSpec, GeneratorWorker
from engine.types import GenerateRequest, GenerateResult, Manifest, Sampling, WeightVersion
from engine.vllm_engine import EngineSpec, FinishedSample

SAMPLING = Sampling(max_tokens=4, stop_token_ids=(2,))


@dataclass
class FakeEngine:
    """Draws `seed % 4 + 1` tokens, one a step, for at most `max_running` requests, lowest priority number first.

    The last token is 2 if there are fewer than 4. It refuses what a real engine would: unknown ids, ids twice.
    """

    max_running: int = 100
    fail_at_step: int | None = None
    logprob: float = -1.0
    finish_reason: str | None = None
    num_steps: int = 0
    waiting: list[tuple[int, int, str, int]] = field(default_factory=list)
    running: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    fail_repack: bool = False
    vocabulary_size: int = 20

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
        for request_id, prompt, seed in zip(request_ids, prompt_ids, seeds, strict=True):
            assert prompt
            assert request_id not in self.priorities
            if seed == 666:
                self.abort(request_ids[:1])
                raise ValueError("the engine does not like this seed")
            self.priorities[request_id] = priority
            self.waiting.append((priority, len(self.priorities), request_id, seed))

    def step(self) -> list[FinishedSample]:
        assert self.waiting or self.running, "a step with nothing to do"
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("out of memory")

        self.waiting.sort()
        while self.waiting and len(self.running) < self.max_running:
            _, _, request_id, seed = self.waiting.pop(0)
            self.running[request_id] = (seed, [])
        finished = []
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
            assert request_id in self.priorities
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
        self.poisoned = True
        if self.fail == "half-way":
            raise RuntimeError("bucket 4 was overwritten")
        self.poisoned = False
        return {"w"}, 8

    def close(self) -> None:
        self.closed = True


def make_worker(
    engine: FakeEngine, receiver: FakeReceiver | None = None, *, loaded_version: int | None = 0
) -> GeneratorWorker:
    """A started worker over fakes."""
    spec = GeneratorSpec(
        model_dir="none",
        max_model_len=8,
        loaded_version=None if loaded_version is None else WeightVersion(loaded_version),
    )

    def make_engine(engine_spec: EngineSpec) -> FakeEngine:
        assert engine_spec.max_model_len == 8
        return engine

    worker = GeneratorWorker(spec, make_engine)
    worker._receiver = receiver  # type: ignore[assignment] # a fake; attach would want shared memory
    return worker


def request(*seeds: int, version: int = 0, priority: int = 0, prompt: tuple[int, ...] = (5, 6)) -> GenerateRequest:
    return GenerateRequest(
        version=WeightVersion(version),
        prompt_ids=(prompt,) * len(seeds),
        seeds=seeds,
        sampling=SAMPLING,
        priority=priority,
    )


def manifest(version: int) -> Manifest:
    return Manifest(
        epoch=0,
        version=WeightVersion(version),
        written_version=WeightVersion(version),
        plan_hash="p",
        slot=0,
        digests={0: "d"},
    )


async def publish(worker: GeneratorWorker, version: int) -> None:
    await worker.prepare(manifest(version))
    await worker.flip(manifest(version))


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker ignores Ctrl-C and freezes its garbage; here it runs in pytest's process."""
    monkeypatch.setattr("engine.generator._freeze_garbage", lambda: None)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


OnLoop = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["asyncio", "trio"])
def on_loop(request: pytest.FixtureRequest) -> OnLoop:
    """Run an async test function on each backend."""

    def run(scenario: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            with anyio.fail_after(10):
                await scenario()

        anyio.run(limited, backend=request.param)

    return run


def test_samples_come_back_in_the_requests_order(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine())
        await worker.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            result = await worker.generate(request(3, 0, 1))
            await worker.stop()

        assert result.lengths.tolist() == [4, 1, 2]
        assert result.token_ids.tolist() == [10, 11, 12, 13, 2, 10, 2]
        assert result.logprobs.tolist() == [-1.0] * 7
        assert result.finish_reasons == ("length", "stop", "stop")
        assert result.token_ids.dtype == result.lengths.dtype == result.versions.dtype == np.int32
        assert result.logprobs.dtype == np.float32
        assert result.busy_s > 0.0

    on_loop(scenario)


def test_honest_version_labels(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine(), FakeReceiver(), loaded_version=None)
        await worker.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            for version in (0, 1, 2):
                await worker.prepare(manifest(version))
                report = await worker.flip(manifest(version))
                assert (report.version, report.num_bytes) == (version, 8)
                result = await worker.generate(request(3, 3, version=version))
                assert set(result.versions.tolist()) == {version}
            await worker.stop()

    on_loop(scenario)


def test_another_version_is_refused_and_both_are_named(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine(), loaded_version=4)
        await worker.start()
        with pytest.raises(VersionMismatch, match="serves version 4, version 5 was asked for"):
            await worker.generate(request(1, version=5))

        fresh = make_worker(FakeEngine(), loaded_version=None)
        await fresh.start()
        with pytest.raises(VersionMismatch, match="has no version yet, version 0 was asked for"):
            await fresh.generate(request(1))

    on_loop(scenario)


def test_a_flip_is_refused_while_requests_run_and_waits_for_nobody(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        worker = make_worker(engine, FakeReceiver())
        await worker.start()
        await worker.prepare(manifest(1))
        results: list[GenerateResult] = []

        async def generate() -> None:
            results.append(await worker.generate(request(3, 1)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(GeneratorError, match="cannot flip to version 1: 2 samples of version 0 are under way"):
                await worker.flip(manifest(1))

            assert engine.log == []
            tasks.start_soon(worker.run)
            while not results:
                await anyio.wait_all_tasks_blocked()
            await worker.flip(manifest(1))
            await worker.stop()

        assert results[0].versions.tolist() == [0] * 6
        assert engine.log == ["repack ['w']", "reset", "close"]

    on_loop(scenario)


def test_a_flip_happens_between_two_steps_of_nothing_else(on_loop: OnLoop) -> None:
    """A prepare, a report and a second request get their turn while the first one is decoded."""

    async def scenario() -> None:
        engine = FakeEngine()
        worker = make_worker(engine, FakeReceiver())
        await worker.start()
        seen: list[int] = []

        async def others() -> None:
            await worker.prepare(manifest(1))
            await worker.report()
            seen.append(engine.num_steps)
            await worker.generate(request(0))
            seen.append(engine.num_steps)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            tasks.start_soon(others)
            await worker.generate(request(3, 3))
            await worker.stop()

        assert max(seen) <= 3  # the first request takes 4 steps

    on_loop(scenario)


@pytest.mark.parametrize("fail", ["half-way", "repack"])
def test_whole_versions(on_loop: OnLoop, fail: str) -> None:
    """A flip that failed after its first byte serves nothing until a whole version is applied."""

    async def scenario() -> None:
        engine, receiver = FakeEngine(fail_repack=fail == "repack"), FakeReceiver(fail=fail)
        worker = make_worker(engine, receiver)
        await worker.start()
        await worker.prepare(manifest(1))
        with pytest.raises(RuntimeError, match=r"overwritten|no memory"):
            await worker.flip(manifest(1))

        for version in (0, 1):
            with pytest.raises(GeneratorError, match=f"cannot serve version {version}: the flip to version 1 failed"):
                await worker.generate(request(1, version=version))

        receiver.fail, engine.fail_repack = "", False
        engine.log.clear()
        await worker.prepare(manifest(2))
        await worker.flip(manifest(2))
        assert engine.log == ["repack ['v', 'w']", "reset"]  # all of it: nobody knows what was packed from what
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            result = await worker.generate(request(1, version=2))
            await worker.stop()

        assert result.versions.tolist() == [2, 2]

    on_loop(scenario)


@pytest.mark.parametrize("fail", ["prepare", "before"])
def test_a_failure_before_the_first_byte_leaves_the_old_version_serving(on_loop: OnLoop, fail: str) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine(), FakeReceiver(fail=fail))
        await worker.start()
        with pytest.raises(RuntimeError, match="bucket 3"):
            await publish(worker, 1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            result = await worker.generate(request(1, version=0))
            await worker.stop()

        assert result.versions.tolist() == [0, 0]

    on_loop(scenario)


def test_an_engine_that_fails_ends_run_and_every_call(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine(fail_at_step=2))
        await worker.start()
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

        reason = "its engine failed: RuntimeError: out of memory"
        assert sorted(errors) == [
            f"generator-0: {reason}",
            f"generator-0: {reason}, with 1 of 1 samples of version 0 under way",
            f"generator-0: {reason}, with 1 of 2 samples of version 0 under way",
        ]
        with pytest.raises(GeneratorError, match="serves nothing any more: its engine failed"):
            await worker.generate(request(1))

        await worker.stop()

    on_loop(scenario)


def test_stop_ends_calls_that_are_under_way(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        engine, receiver = FakeEngine(), FakeReceiver()
        worker = make_worker(engine, receiver)
        await worker.start()

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
        with pytest.raises(GeneratorError, match="it was stopped"):
            await worker.run()

    on_loop(scenario)


def test_a_cancelled_call_leaves_the_engine(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        worker = make_worker(engine)
        await worker.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.generate, request(3, 3))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

        assert not engine.waiting
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            result = await worker.generate(request(0))
            await worker.stop()

        assert result.lengths.tolist() == [1]

    on_loop(scenario)


def test_evaluation_waits_behind_training(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine(max_running=2))
        await worker.start()
        ended: list[str] = []

        async def generate(name: str, wanted: GenerateRequest) -> None:
            await worker.generate(wanted)
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, "evaluation", request(3, 3, priority=1))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(generate, "training", request(3, 3, 3, 3))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(worker.run)
            while len(ended) < 2:
                await anyio.wait_all_tasks_blocked()
            await worker.stop()

        assert ended == ["training", "evaluation"]

    on_loop(scenario)


def test_an_empty_request_has_an_empty_answer(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine())
        await worker.start()
        result = await worker.generate(request())
        assert (len(result.token_ids), len(result.lengths), result.finish_reasons) == (0, 0, ())
        with pytest.raises(VersionMismatch):
            await worker.generate(request(version=3))

    on_loop(scenario)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (request(1, prompt=(1, 2, 3, 4, 5)), "prompt 0 has 5 tokens and max_tokens is 4.*max_model_len 8"),
        (request(1, prompt=()), "prompt 0 is empty"),
        (request(1, prompt=(5, 20)), r"prompt 0 has token ids from 5 to 20; the model's are in \[0, 20\)"),
        (request(1, prompt=(-1,)), "prompt 0 has token ids from -1 to -1"),
        (request(1, 666), "does not like this seed"),
        (
            GenerateRequest(version=WeightVersion(0), prompt_ids=((5,), (6,)), seeds=(1,), sampling=SAMPLING),
            "2 prompts but 1 seeds",
        ),
        (
            GenerateRequest(
                version=WeightVersion(0),
                prompt_ids=((5,),),
                seeds=(1,),
                sampling=Sampling(max_tokens=0, stop_token_ids=()),
            ),
            "max_tokens must be at least 1, got 0",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_a_value_error(
    on_loop: OnLoop, wanted: GenerateRequest, message: str
) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine())
        await worker.start()
        with pytest.raises(ValueError, match=message):
            await worker.generate(wanted)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            await worker.generate(request(1))  # nothing of the refused one is left
            await worker.stop()

    on_loop(scenario)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_loud_failure_of_broken_weights(on_loop: OnLoop, logprob: float) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine(logprob=logprob))
        await worker.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            with pytest.raises(GeneratorError, match="version 0 gives logprobs that are not finite"):
                await worker.generate(request(1))
            await worker.stop()

    on_loop(scenario)


def test_an_unknown_finish_reason_is_an_error(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine(finish_reason="repetition"))
        await worker.start()

        async def generate() -> None:
            with pytest.raises(GeneratorError, match="ended with 'repetition'"):
                await worker.generate(request(0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(GeneratorError, match="ended with 'repetition'"):
                await worker.run()

    on_loop(scenario)


def test_busy_time_is_shared_by_the_calls_under_way(on_loop: OnLoop) -> None:
    async def scenario() -> None:
        worker = make_worker(FakeEngine())
        await worker.start()
        results: list[GenerateResult] = []

        async def generate(*seeds: int) -> None:
            results.append(await worker.generate(request(*seeds)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, 3, 3, 3)
            tasks.start_soon(generate, 3)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(worker.run)
            while len(results) < 2:
                await anyio.wait_all_tasks_blocked()
            report = await worker.report()
            await worker.stop()

        assert sum(result.busy_s for result in results) == pytest.approx(report.busy_s)
        assert report.peak_memory_bytes > 1 << 20

    on_loop(scenario)
