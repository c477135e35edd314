"""What generation through asyncrl costs: tokens/s of a replica over tokens/s of bare vLLM, on the same requests.

Contenders, each in a process of its own, taking turns within one run:

    asyncrl            a replica as in a run: a Ray actor, called from this process with one request for all samples;
                       the clock runs from the request's objects to the result's
    LLMEngine          bare vLLM in one process, stepped in a loop
    AsyncLLM           bare vLLM's asynchronous engine, front end and engine process on the same core
    AsyncLLM, 2 cores  the same, free to use a second core

All but the last are bound to one core; the driver has another one if there is one. All get the same settings, the same
niceness and the same care (final outputs only, no detokenizing, one cheap copy of the sampling
parameters a request, frozen garbage).
`ratio` is asyncrl's median over that of the fastest bare engine; every contender must draw the same tokens. CPU time
(all processes of a contender, the driver included) tells what a busy machine hides.

    python benchmarks/generate.py                  # both workloads
    python benchmarks/generate.py --workload tiny --rounds 15 --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
from bare_vllm import Bare, Contender, Turn, Workload, bare, digest_of
from rich.console import Console
from rich.table import Table

from asyncrl.model_source import materialize
from asyncrl.schema import FreshModel, Model
from engine.generator import GeneratorSpec, GeneratorWorker
from engine.types import GenerateResult, WeightVersion
from engine.vllm_cpu import worker_environment
from engine.worker_process import pin_threads
from engine.workers import Cluster, ClusterSpec, WorkerSpec

GOAL = 0.9
SAME_CORE = ("LLMEngine", "AsyncLLM")
TWO_CORES = "AsyncLLM, 2 cores"


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
    info = await worker.call("start", deadline_s=300)

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
        yield Contender(turn, info.pid)
        await worker.call("stop", deadline_s=60)


async def measure(workload: Workload, dtype: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Let the contenders take turns; medians, ranges and the ratio."""
    model_dir = str(materialize(Model(fresh=workload.model), 0, folder / workload.name).folder)
    cores = sorted(os.sched_getaffinity(0))
    core, others = cores[0], tuple(cores[1:]) or (cores[0],)
    turns: dict[str, list[Turn]] = {}
    cpu: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            Cluster(ClusterSpec(address=None, num_devices=1), environment=worker_environment(1))
        )
        ours = await stack.enter_async_context(replica(cluster, model_dir, workload, dtype, core))
        contenders = {"asyncrl": ours}
        niceness = os.getpriority(os.PRIO_PROCESS, ours.pid)
        kinds = [("LLMEngine", (core,)), ("AsyncLLM", (core,))] + [(TWO_CORES, tuple(cores))] * (len(cores) > 1)
        for kind, bound in kinds:
            spec = Bare(kind, bound, niceness, model_dir, workload, dtype, folder / f"{workload.name}-{kind}.log")
            contenders[kind] = await stack.enter_async_context(bare(spec))
        pin_threads(others)
        names = list(contenders)
        for number in range(-2, rounds):  # two to warm up
            for name in names[number % len(names) :] + names[: number % len(names)]:
                before = cpu_seconds(contenders[name].pid)
                done = await contenders[name].take_turn()
                if number >= 0:
                    turns.setdefault(name, []).append(done)
                    cpu[name] = cpu.get(name, 0.0) + cpu_seconds(contenders[name].pid) - before
    pin_threads(cores)
    return summarize(workload, dtype, turns, cpu)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process, its children and, for a replica's requests and results, this process have used."""
    process = psutil.Process(pid)
    used = [part.cpu_times() for part in (process, *process.children(recursive=True), psutil.Process())]
    return sum(times.user + times.system for times in used)


def summarize(workload: Workload, dtype: str, turns: dict[str, list[Turn]], cpu: dict[str, float]) -> dict[str, Any]:
    digests = {turn.digest for done in turns.values() for turn in done}
    if len(digests) != 1:
        raise SystemExit(f"{workload.name}: the contenders drew different tokens: {sorted(digests)}")

    rates = {name: [turn.rate for turn in done] for name, done in turns.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    fastest = max((*SAME_CORE, TWO_CORES), key=lambda name: medians[name])
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
        "cpu_ms_per_1000_tokens": {
            name: round(seconds * 1e6 / sum(turn.num_tokens for turn in turns[name]), 2)
            for name, seconds in cpu.items()
        },
        "goal": GOAL,
    }


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['workload']}: {result['num_samples']} samples, {result['num_tokens']} tokens, {result['dtype']}"
    )
    for heading in ("", "tokens/s", "range", "of bare", "CPU ms / 1k"):
        table.add_column(heading, justify="left" if not heading else "right")
    fastest, cpu = result["tokens_per_s"][result["fastest_bare"]], result["cpu_ms_per_1000_tokens"]
    for name, rate in result["tokens_per_s"].items():
        low, high = result["tokens_per_s_range"][name]
        table.add_row(name, f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{rate / fastest:.3f}", f"{cpu[name]:.1f}")
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
