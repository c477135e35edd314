"""What generation through asyncrl costs: tokens/s of a replica over tokens/s of bare vLLM, on the same requests.

Contenders, each in a process of its own, taking turns within one run:

    asyncrl            a replica as in a run: a Ray actor, called from this process with one request for all samples;
                       the clock runs from the request's objects to the result's
    LLMEngine          bare vLLM in one process, stepped in a loop
    AsyncLLM           bare vLLM's asynchronous engine, front end and engine process on the same core
    AsyncLLM, 2 cores  the same, free to use a second core

All but the last are bound to one core; the driver has another one if there is one. All get the same settings and the
same care (final outputs only, no detokenizing, one cheap copy of the sampling parameters a request, frozen garbage).
`ratio` is asyncrl's median over that of the fastest bare engine on the same core; every contender must draw the same
tokens.

    python benchmarks/generate.py                  # both workloads
    python benchmarks/generate.py --workload tiny --rounds 15 --json
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from asyncrl.model_source import materialize
from asyncrl.schema import FreshModel, Model
from engine.generator import GeneratorSpec, GeneratorWorker
from engine.types import GenerateRequest, GenerateResult, Sampling, WeightVersion
from engine.vllm_cpu import worker_environment
from engine.worker_process import pin_threads
from engine.workers import Cluster, ClusterSpec, WorkerSpec

GOAL = 0.9
END_TOKEN = 2
SAME_CORE = ("LLMEngine", "AsyncLLM")
TWO_CORES = "AsyncLLM, 2 cores"


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


TINY = FreshModel(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=256
)
TEN_MILLION = FreshModel(
    hidden_size=320,
    num_hidden_layers=8,
    num_attention_heads=5,
    num_key_value_heads=5,
    intermediate_size=864,
    max_position_embeddings=256,
)
WORKLOADS = (
    Workload(name="tiny", model=TINY, num_samples=512, prompt_tokens=7, max_tokens=5, max_model_len=16),
    Workload(name="long", model=TEN_MILLION, num_samples=64, prompt_tokens=16, max_tokens=128, max_model_len=144),
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


Contender = Callable[[], Awaitable[Turn]]
Generate = Callable[[], list[Any]]
Close = Callable[[], None]


def digest_of(tokens: Sequence[Sequence[int]]) -> str:
    return hashlib.blake2b(repr([list(sample) for sample in tokens]).encode(), digest_size=8).hexdigest()


# --- bare vLLM, in a child process


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


def bare_process(
    pipe: Connection, log: Path, kind: str, model_dir: str, workload: Workload, dtype: str, cores: tuple[int, ...]
) -> None:
    """Serve turns until the pipe closes."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), sys.stderr.fileno())
    pin_threads(cores)
    import torch

    torch.set_num_threads(1)
    config = engine_args(model_dir, workload, dtype).create_engine_config()
    generate, close = (llm_engine if kind == "LLMEngine" else async_llm)(config, workload)
    pin_threads(cores)
    gc.collect()
    gc.freeze()
    pipe.send("ready")
    while True:
        try:
            pipe.recv()
        except EOFError:
            close()
            os._exit(0)

        started = time.perf_counter()
        outputs = generate()
        tokens = [output.token_ids for output in outputs]
        logprobs = [output.logprobs.logprobs for output in outputs]
        seconds = time.perf_counter() - started
        assert [len(sample) for sample in logprobs] == [len(sample) for sample in tokens]
        pipe.send(Turn(seconds, sum(map(len, tokens)), digest_of(tokens)))


@asynccontextmanager
async def bare(
    kind: str, model_dir: str, workload: Workload, dtype: str, cores: tuple[int, ...]
) -> AsyncIterator[Contender]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    log = Path(f"{model_dir}-{kind}-{len(cores)}.log")
    process = spawn.Process(target=bare_process, args=(theirs, log, kind, model_dir, workload, dtype, cores))
    process.start()
    theirs.close()

    async def receive() -> Any:  # noqa: ANN401 - "ready" or a Turn
        try:
            return await anyio.to_thread.run_sync(ours.recv)
        except EOFError:
            said = await anyio.Path(log).read_text()
            raise SystemExit(f"bare {kind} died:\n{said[-2000:]}") from None

    async def turn() -> Turn:
        ours.send("go")
        done: Turn = await receive()
        return done

    try:
        await receive()
        yield turn
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()


# --- asyncrl


@asynccontextmanager
async def replica(
    cluster: Cluster, model_dir: str, workload: Workload, dtype: str, core: int
) -> AsyncIterator[Contender]:
    spec = GeneratorSpec(
        name=f"generator-{workload.name}",
        model_dir=model_dir,
        dtype=dtype,
        max_model_len=workload.max_model_len,
        cpus=(core,),
        loaded_version=WeightVersion(0),
    )
    worker = await cluster.place(WorkerSpec(name=spec.name, cls=GeneratorWorker, args=(spec,)))
    await worker.call("start", deadline_s=300)

    async def turn() -> Turn:
        request = workload.request
        started = time.perf_counter()
        result: GenerateResult = await worker.call("generate", request, deadline_s=300)
        seconds = time.perf_counter() - started
        ends = result.lengths.cumsum().tolist()
        tokens = result.token_ids.tolist()
        samples = [tokens[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        return Turn(seconds, len(tokens), digest_of(samples))

    async with anyio.create_task_group() as tasks:

        async def pump() -> None:
            await worker.call("run", deadline_s=None)

        tasks.start_soon(pump)
        yield turn
        await worker.call("stop", deadline_s=60)


# --- the comparison


async def measure(workload: Workload, dtype: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Let the contenders take turns; medians, ranges and the ratio."""
    model_dir = str(materialize(Model(fresh=workload.model), 0, folder / workload.name).folder)
    cores = sorted(os.sched_getaffinity(0))
    core, others = cores[0], tuple(cores[1:]) or (cores[0],)
    turns: dict[str, list[Turn]] = {}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            Cluster(ClusterSpec(address=None, num_devices=1), environment=worker_environment(1))
        )
        contenders = {"asyncrl": await stack.enter_async_context(replica(cluster, model_dir, workload, dtype, core))}
        kinds = [("LLMEngine", (core,)), ("AsyncLLM", (core,))] + [(TWO_CORES, tuple(cores))] * (len(cores) > 1)
        for kind, bound in kinds:
            contenders[kind] = await stack.enter_async_context(bare(kind, model_dir, workload, dtype, bound))
        pin_threads(others)
        names = list(contenders)
        for number in range(-2, rounds):  # two to warm up
            for name in names[number % len(names) :] + names[: number % len(names)]:
                done = await contenders[name]()
                if number >= 0:
                    turns.setdefault(name, []).append(done)
    pin_threads(cores)
    return summarize(workload, dtype, turns)


def summarize(workload: Workload, dtype: str, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    digests = {turn.digest for done in turns.values() for turn in done}
    if len(digests) != 1:
        raise SystemExit(f"{workload.name}: the contenders drew different tokens: {sorted(digests)}")

    rates = {name: [turn.rate for turn in done] for name, done in turns.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    fastest = max(SAME_CORE, key=lambda name: medians[name])
    by_round = [mine / theirs for mine, theirs in zip(rates["asyncrl"], rates[fastest], strict=True)]
    return {
        "workload": workload.name,
        "dtype": dtype,
        "num_samples": workload.num_samples,
        "num_tokens": turns["asyncrl"][0].num_tokens,
        "rounds": len(by_round),
        "tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "tokens_per_s_range": {name: [round(min(values), 1), round(max(values), 1)] for name, values in rates.items()},
        "fastest_bare": fastest,
        "ratio": round(medians["asyncrl"] / medians[fastest], 4),
        "ratio_range": [round(min(by_round), 4), round(max(by_round), 4)],
        "goal": GOAL,
    }


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['workload']}: {result['num_samples']} samples, {result['num_tokens']} tokens, {result['dtype']}"
    )
    for heading in ("", "tokens/s", "range", "of the fastest bare"):
        table.add_column(heading, justify="left" if not heading else "right")
    fastest = result["tokens_per_s"][result["fastest_bare"]]
    for name, rate in result["tokens_per_s"].items():
        low, high = result["tokens_per_s_range"][name]
        table.add_row(name, f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{rate / fastest:.3f}")
    console.print(table)
    low, high = result["ratio_range"]
    console.print(
        f"asyncrl / {result['fastest_bare']}: {result['ratio']:.3f} (by round {low:.3f} to {high:.3f}; goal {GOAL})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[workload.name for workload in WORKLOADS], help="one of them only")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default 9)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")

    os.environ.update(worker_environment(1))
    console = Console(stderr=False)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-generate-") as folder:
        os.environ["TMPDIR"] = folder  # AsyncLLM leaves files there
        for workload in WORKLOADS:
            if arguments.workload in (None, workload.name):
                results.append(anyio.run(measure, workload, arguments.dtype, arguments.rounds, Path(folder)))
                show(console, results[-1])
    if arguments.json:
        print(json.dumps({result["workload"]: result for result in results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
