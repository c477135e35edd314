"""Bare vLLM as benchmarks/generate.py compares it: one engine in a process of its own, taking turns.

Also what every contender is given (`Workload`) and gives back (`Turn`).
"""

from __future__ import annotations

import asyncio
import copy
import gc
import hashlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio

from asyncrl.schema import FreshModel
from engine.types import GenerateRequest, Sampling, WeightVersion
from engine.worker_process import pin_threads

END_TOKEN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What all contenders generate. A token of a random model ends its response with a chance of 1 in 64."""

    name: str
    model: FreshModel
    num_samples: int
    prompt_tokens: int
    max_tokens: int
    max_model_len: int

    @property
    def request(self) -> GenerateRequest:
        return GenerateRequest(
            version=WeightVersion(0),
            prompt_ids=tuple(
                (1, *((7 * (i // 8) + j) % 40 + 3 for j in range(self.prompt_tokens - 1)))
                for i in range(self.num_samples)
            ),
            seeds=tuple(range(10**15, 10**15 + self.num_samples)),
            sampling=Sampling(max_tokens=self.max_tokens, stop_token_ids=(END_TOKEN,)),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch by one contender: seconds, tokens drawn, and what they were."""

    seconds: float
    num_tokens: int
    digest: str

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Contender:
    """Takes a turn when asked to; `pid` is the process that does the work, alone or with its children."""

    take_turn: Callable[[], Awaitable[Turn]]
    pid: int


Generate = Callable[[], list[Any]]
Close = Callable[[], None]


def digest_of(tokens: Sequence[Sequence[int]]) -> str:
    return hashlib.blake2b(repr([list(sample) for sample in tokens]).encode(), digest_size=8).hexdigest()


def engine_args(model_dir: str, workload: Workload, dtype: str) -> Any:  # noqa: ANN401 - vLLM has no types for us
    from vllm import EngineArgs

    return EngineArgs(
        model=model_dir,
        dtype=dtype,
        max_model_len=workload.max_model_len,
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )


def bare_requests(workload: Workload) -> list[tuple[str, dict[str, Any], Any]]:
    """Id, prompt and sampling parameters of every request, made anew for each turn as a user would."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request = workload.request
    template = SamplingParams(
        temperature=1.0,
        max_tokens=workload.max_tokens,
        stop_token_ids=[END_TOKEN],
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    requests: list[tuple[str, dict[str, Any], Any]] = []
    for index, (prompt, seed) in enumerate(zip(request.prompt_ids, request.seeds, strict=True)):
        params = copy.copy(template)
        params.seed = seed
        params.skip_clone = True
        requests.append((str(index), {"type": "token", "prompt_token_ids": list(prompt)}, params))
    return requests


def llm_engine(config: Any, workload: Workload) -> tuple[Generate, Close]:  # noqa: ANN401 - vLLM's
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)

    def generate() -> list[Any]:
        done: dict[int, Any] = {}
        for request_id, prompt, params in bare_requests(workload):
            engine.add_request(request_id, prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                done[int(output.request_id)] = output.outputs[0]
        return [done[index] for index in range(workload.num_samples)]

    return generate, engine.engine_core.shutdown


def async_llm(config: Any, workload: Workload) -> tuple[Generate, Close]:  # noqa: ANN401 - vLLM's
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # after the config is made: vLLM sets it to spawn there
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()
    numbers = itertools.count()

    async def start() -> Any:  # noqa: ANN401 - vLLM's
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

    engine = loop.run_until_complete(start())

    async def one(request_id: str, prompt: dict[str, Any], params: Any) -> Any:  # noqa: ANN401 - vLLM's
        (output,) = [output async for output in engine.generate(prompt, params, request_id=request_id)]
        return output.outputs[0]

    async def batch() -> list[Any]:
        turn = next(numbers)
        requests = bare_requests(workload)
        return await asyncio.gather(*(one(f"{turn}-{name}", prompt, params) for name, prompt, params in requests))

    return lambda: loop.run_until_complete(batch()), lambda: engine.shutdown(timeout=0)


@dataclass(frozen=True, slots=True)
class Bare:
    """One bare contender: LLMEngine or AsyncLLM, the cores it may use, and how nice it is."""

    kind: str
    cores: tuple[int, ...]
    niceness: int
    model_dir: str
    workload: Workload
    dtype: str
    log: Path


def bare_process(pipe: Connection, spec: Bare) -> None:
    """Serve turns until the pipe closes."""
    os.nice(spec.niceness - os.nice(0))
    os.dup2(os.open(spec.log, os.O_WRONLY | os.O_CREAT, 0o600), sys.stderr.fileno())
    pin_threads(spec.cores)
    import torch

    torch.set_num_threads(1)
    config = engine_args(spec.model_dir, spec.workload, spec.dtype).create_engine_config()
    generate, close = (llm_engine if spec.kind == "LLMEngine" else async_llm)(config, spec.workload)
    pin_threads(spec.cores)
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    while True:
        try:
            pipe.recv()
        except EOFError:
            close()
            return

        started = time.perf_counter()
        outputs = generate()
        tokens = [output.token_ids for output in outputs]
        logprobs = [output.logprobs.logprobs for output in outputs]
        seconds = time.perf_counter() - started
        assert [len(sample) for sample in logprobs] == [len(sample) for sample in tokens]
        pipe.send(Turn(seconds, sum(map(len, tokens)), digest_of(tokens)))


@asynccontextmanager
async def bare(spec: Bare) -> AsyncIterator[Contender]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=bare_process, args=(theirs, spec))
    process.start()
    theirs.close()

    async def receive() -> Any:  # noqa: ANN401 - "ready" or a Turn
        try:
            return await anyio.to_thread.run_sync(ours.recv)
        except EOFError:
            said = await anyio.Path(spec.log).read_text()
            raise SystemExit(f"bare {spec.kind} died:\n{said[-2000:]}") from None

    async def turn() -> Turn:
        ours.send("go")
        done: Turn = await receive()
        return done

    try:
        await receive()
        assert process.pid is not None
        yield Contender(turn, process.pid)
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()
