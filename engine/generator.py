"""One generator replica: batches of samples in, columnar results out, whole weight versions in between.

A plain class that `engine.workers` places as an actor; its methods interleave on one event loop. `run` is the pump: it
steps the engine while there are requests and lets the other calls in between two decode steps, so that a flip meets an
engine that computes nothing, and the version of every token is known.

No vLLM and no torch here: `engine.vllm_engine` holds the engine, `engine.receiver` the buckets.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from engine.generate_call import GenerateCall, GeneratorError, VersionMismatch, check_request
from engine.inference_engine import InferenceEngine, WeightReceiver
from engine.layout import TensorSpec
from engine.types import FlipReport, GenerateRequest, GenerateResult, Manifest, WeightVersion
from engine.vllm_engine import EngineSpec, FinishedSample
from engine.vllm_parallel import start_engine
from engine.worker_process import ignore_interrupt, peak_memory_bytes, peak_memory_bytes_of, pin_threads

if TYPE_CHECKING:
    from engine.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec(EngineSpec):
    """One replica: its engine (see `EngineSpec`) and its place.

    Attributes:
        name: for messages, for instance "generator-0".
        loaded_version: the version that `model_dir` holds. None: nothing is generated before the first flip.
    """

    name: str = "generator-0"
    loaded_version: WeightVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorInfo:
    """A started replica.

    Attributes:
        pid: of its process.
        worker_pids: of the processes that compute for it: one a tensor-parallel rank, none with one rank.
        params: live parameters of every rank by vLLM's name.
        start_s: seconds that `start` took.
        peak_memory_bytes: of all of them so far.
    """

    pid: int
    worker_pids: tuple[int, ...]
    params: tuple[Mapping[str, TensorSpec], ...]
    start_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker has used so far: peak resident bytes of its processes, and seconds in which it computed."""

    pid: int
    peak_memory_bytes: int
    busy_s: float


class GeneratorWorker:
    """Serves one weight version at a time; every token that it returns was computed by exactly that one.

    Usage (each an actor call): `start()`, `attach(...)`, `run()` for the whole run; then for every version
    `prepare(manifest)`, `flip(manifest)`, any number of `generate(request)`; at the end `stop()`.
    """

    def __init__(
        self, spec: GeneratorSpec, make_engine: Callable[[EngineSpec], InferenceEngine] = start_engine
    ) -> None:
        """Do nothing yet; `start` does.

        Args:
            spec: the replica.
            make_engine: another engine than vLLM's.
        """
        self._spec = spec
        self._make_engine = make_engine
        self._engine: InferenceEngine | None = None
        self._receiver: WeightReceiver | None = None
        self._version: WeightVersion | None = spec.loaded_version
        self._broken: str | None = None  # why nothing is served until a whole version has been applied
        self._ended: str | None = None  # why nothing will be served any more
        self._calls: list[GenerateCall] = []
        self._owners: dict[str, GenerateCall] = {}
        self._request_numbers = itertools.count()
        self._wake = anyio.Event()
        self._pump_ended: anyio.Event | None = None
        self._busy_s = 0.0

    async def start(self) -> GeneratorInfo:
        """Load the model and bind the threads. Takes seconds, and nothing else is answered meanwhile.

        Raises:
            RuntimeError: the process lacks `engine.vllm_cpu.worker_environment`.
            ValueError: cores that this process may not use, or a model folder that the engine refuses.
        """
        assert self._engine is None, "start was called twice"
        started = time.perf_counter()
        spec = self._spec
        ignore_interrupt()
        if spec.cpus is not None:
            pin_threads(spec.cpus)
            if spec.num_threads is None:
                spec = replace(spec, num_threads=max(len(spec.cpus) // spec.tp, 1))
        engine = self._make_engine(spec)
        if spec.cpus is not None:
            pin_threads(spec.cpus)
        _freeze_garbage()
        self._engine = engine
        return GeneratorInfo(
            pid=os.getpid(),
            worker_pids=engine.worker_pids,
            params=engine.param_specs(),
            start_s=time.perf_counter() - started,
            peak_memory_bytes=self._peak_memory_bytes(),
        )

    async def attach(self, plan: Plan, folder: str, num_slots: int) -> None:
        """Join the run's shared memory: from now on `prepare` and `flip` take versions from it.

        Args:
            plan: the run's plan; its target is one replica.
            folder: the run's folder of shared memory.
            num_slots: versions that the store can hold.

        Raises:
            WeightTransferError: the live parameters are not those of the plan.
        """
        engine = self._serving_engine()
        assert self._receiver is None, "attach was called twice"
        assert not self._calls, "attach while requests run"
        self._receiver = engine.attach(plan, Path(folder), num_slots)
        _freeze_garbage()

    async def prepare(self, manifest: Manifest) -> float:
        """Verify that a version is whole in shared memory. Changes nothing; requests may be under way.

        Hashing runs between two engine steps, at about 16 GB/s.

        Returns:
            Milliseconds that it took, waiting for the engine's step excluded.

        Raises:
            WeightTransferError: what is missing or differs.
        """
        started = time.perf_counter()
        self._attached_receiver().prepare(manifest)
        return (time.perf_counter() - started) * 1e3

    async def flip(self, manifest: Manifest) -> FlipReport:
        """Serve the prepared version from now on (invariants *whole versions* and *no stale cache*).

        Raises:
            GeneratorError: requests are under way; the old version stays.
            WeightTransferError: the buckets are no longer what was prepared. If a byte had been written, this replica
                refuses every request until a flip succeeds.
        """
        engine, receiver = self._serving_engine(), self._attached_receiver()
        if self._calls:
            raise GeneratorError(
                f"{self._spec.name} cannot flip to version {manifest.version}: {self._num_open} samples of version "
                f"{self._version} are under way; wait for their generate calls"
            )

        started = time.perf_counter()
        try:
            touched, num_bytes = receiver.apply(manifest)
        except BaseException as error:
            if receiver.poisoned:
                self._break(manifest, error)
            raise

        copied = time.perf_counter()
        try:
            # After a failure it is unknown which layers were packed from what.
            engine.repack(touched if self._broken is None else None)
            engine.reset_prefix_cache()
        except BaseException as error:
            self._break(manifest, error)
            raise

        self._version, self._broken = manifest.version, None
        return FlipReport(
            version=manifest.version,
            copy_ms=(copied - started) * 1e3,
            repack_ms=(time.perf_counter() - copied) * 1e3,
            num_bytes=num_bytes,
        )

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Draw one response per prompt; return when the last one has ended. Several calls may be under way.

        Raises:
            VersionMismatch: another version is live, or none.
            ValueError: a request that cannot be served (too long for `max_model_len`, lengths that differ, ...).
            GeneratorError: the replica was broken by a failed flip, is stopped, or its engine failed meanwhile.
        """
        engine = self._serving_engine()
        self._check_version(request.version)
        check_request(request, self._spec.max_model_len, engine.vocabulary_size)
        num_samples = len(request.prompt_ids)
        call = GenerateCall(request, map(str, itertools.islice(self._request_numbers, num_samples)))
        if num_samples == 0:
            return call.result()

        started = time.perf_counter()
        engine.add(call.request_ids, request.prompt_ids, request.seeds, request.sampling, request.priority)
        call.busy_s = time.perf_counter() - started
        self._busy_s += call.busy_s
        self._calls.append(call)
        self._owners.update(dict.fromkeys(call.request_ids, call))
        self._wake.set()
        try:
            await call.ended.wait()
        finally:
            if call.num_open and self._ended is None:  # cancelled
                self._forget(call)
        return call.result()

    async def run(self) -> None:
        """Step the engine while there are requests, until `stop`. Awaited for the whole run, so that a death shows.

        Returns at once if `stop` came first (a run with nothing left to do).

        Raises:
            GeneratorError: the engine failed; every generate call under way raises it too.
        """
        if self._ended is not None and self._pump_ended is None:
            return

        engine = self._serving_engine()
        assert self._pump_ended is None, "run was called twice"
        self._pump_ended = anyio.Event()
        failures: list[Exception] = []  # taken out of the task group, which would wrap them
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, engine, failures)
                await self._pump(engine, failures)
                tasks.cancel_scope.cancel()
        finally:
            self._end("its run call was cancelled")
            self._pump_ended.set()
        if failures:
            raise GeneratorError(f"{self._spec.name}: {self._ended}") from failures[0]

    async def stop(self) -> None:
        """End `run` and release the engine. Calls that are still under way raise GeneratorError."""
        self._end("it was stopped")
        if self._pump_ended is not None:
            await self._pump_ended.wait()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    async def report(self) -> WorkerReport:
        """What this process has used so far."""
        return WorkerReport(pid=os.getpid(), peak_memory_bytes=self._peak_memory_bytes(), busy_s=self._busy_s)

    def _peak_memory_bytes(self) -> int:
        pids = self._engine.worker_pids if self._engine is not None else ()
        return peak_memory_bytes() + sum(map(peak_memory_bytes_of, pids))

    async def _pump(self, engine: InferenceEngine, failures: list[Exception]) -> None:
        try:
            while self._ended is None:
                if self._calls:
                    self._step(engine)
                    await anyio.lowlevel.checkpoint()  # calls that have arrived meanwhile run here
                else:
                    self._wake = anyio.Event()
                    await self._wake.wait()
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._fail(error, failures)

    async def _watch(self, engine: InferenceEngine, failures: list[Exception]) -> None:
        """End the pump if a process of the engine dies while there is nothing to do."""
        death = await engine.died()
        self._fail(RuntimeError(death), failures)

    def _fail(self, error: Exception, failures: list[Exception]) -> None:
        failures.append(error)
        self._end(f"its engine failed: {type(error).__name__}: {error}")

    @property
    def _num_open(self) -> int:
        return sum(call.num_open for call in self._calls)

    def _step(self, engine: InferenceEngine) -> None:
        started = time.perf_counter()
        finished = engine.step()
        elapsed = time.perf_counter() - started
        self._busy_s += elapsed
        num_open = self._num_open
        for call in self._calls:
            call.busy_s += elapsed * call.num_open / num_open
        for sample in finished:
            self._take(sample)

    def _take(self, sample: FinishedSample) -> None:
        """Put one finished sample in its place (invariant *honest version labels*)."""
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"request {sample.request_id} ended with {sample.finish_reason!r}, want stop or length")

        call = self._owners.pop(sample.request_id)
        assert call.request.version == self._version, "the version changed under a request"
        call.put(sample)
        if call.num_open == 0:
            self._calls.remove(call)
            call.ended.set()

    def _forget(self, call: GenerateCall) -> None:
        """Take an unfinished call out of the engine."""
        self._calls.remove(call)
        open_ids = call.open_ids()
        for name in open_ids:
            del self._owners[name]
        if self._engine is not None:
            self._engine.abort(open_ids)

    def _end(self, reason: str) -> None:
        """Serve nothing any more; the first reason stays. Every call under way raises it."""
        if self._ended is not None:
            return

        self._ended = reason
        for call in self._calls:
            call.fail(f"{self._spec.name}: {reason}")
        self._wake.set()

    def _break(self, manifest: Manifest, error: BaseException) -> None:
        self._version = None
        self._broken = f"the flip to version {manifest.version} failed half-way ({type(error).__name__}: {error})"

    def _serving_engine(self) -> InferenceEngine:
        if self._ended is not None:
            raise GeneratorError(f"{self._spec.name} serves nothing any more: {self._ended}")

        assert self._engine is not None, "start comes first"
        return self._engine

    def _attached_receiver(self) -> WeightReceiver:
        assert self._receiver is not None, "attach comes first"
        return self._receiver

    def _check_version(self, wanted: WeightVersion) -> None:
        name = self._spec.name
        if self._broken is not None:
            raise GeneratorError(
                f"{name} cannot serve version {wanted}: {self._broken}; it serves again once a whole version is applied"
            )

        if self._version is None:
            raise VersionMismatch(f"{name} has no version yet, version {wanted} was asked for: flip first")

        if wanted != self._version:
            raise VersionMismatch(f"{name} serves version {self._version}, version {wanted} was asked for")


def _freeze_garbage() -> None:
    """Keep what start-up made out of every later collection: a full one takes 340 ms, in the midst of a batch."""
    gc.collect()
    gc.freeze()
