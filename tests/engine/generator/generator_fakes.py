"""A strict fake engine and receiver, and a replica over them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from engine.generator import GeneratorSpec, GeneratorWorker
from engine.layout import TensorSpec
from engine.plan import Plan
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
    fail_repack: bool = False
    logprob: float = -1.0
    finish_reason: str | None = None
    vocabulary_size: int = 20
    num_steps: int = 0
    waiting: list[tuple[int, int, str, int]] = field(default_factory=list)
    running: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)

    worker_pids: tuple[int, ...] = ()
    death: anyio.Event = field(default_factory=anyio.Event)

    def param_specs(self) -> tuple[Mapping[str, TensorSpec], ...]:
        return ({"w": TensorSpec((2,), "float32"), "v": TensorSpec((1,), "float32")},)

    def attach(self, plan: Plan, folder: Path, num_slots: int) -> FakeReceiver:
        raise AssertionError("not without shared memory")

    async def died(self) -> str:
        await self.death.wait()
        return "tensor-parallel rank 1 died"

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

    def repack(self, touched: Iterable[str] | None) -> int:
        self.log.append(f"repack {sorted(touched) if touched is not None else 'all'}")
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
    worker._receiver = receiver
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
