"""What moving one weight version costs: this engine against gathering, Megatron's resharding and plain memcpy.

Every process holds the shards of one training rank and the parameters of one inference rank of a replica; the same
tensors go the same way by every method, in interleaved rounds of one run, and end as the same bits.

    asyncrl             publish (pack, hash, seal), verify (hash), apply (copy into the parameters), apart
    gather              every training rank gathers whole tensors with gloo's all_gather, broadcasts them over the
                        pipeline stages, and every inference rank cuts its part out
    gather, p2p         the same with point-to-point sends instead of all_gather
    megatron            megatron.core.resharding over gloo, from Megatron's names to Megatron's names
    vllm                whole tensors packed, broadcast, and loaded through vLLM's layerwise reload
    memcpy              every inference rank copies as many bytes as it needs from its own memory

    python benchmarks/reshard.py                                  # all cases
    python benchmarks/reshard.py --case tp4-tp2x2 --rounds 7 --json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from reshard_case import CASES, Case
from rich.console import Console
from rich.table import Table

Seconds = Mapping[str, Mapping[str, float]]
"""Way -> phase -> seconds of the slowest process, of one round."""


def run_case(case: Case, *, num_rounds: int, ways: Sequence[str]) -> list[Seconds]:
    """Start the processes of one case and return their rounds; a first one warms up and is left out."""
    import torch.multiprocessing as mp
    from reshard_ways import process_main

    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "rounds.json"
        mp.start_processes(  # type: ignore[no-untyped-call]
            process_main,
            args=(case, num_rounds + 1, tuple(ways), _free_port(), str(answers)),
            nprocs=case.num_processes,
            start_method="spawn",
        )
        rounds: list[Seconds] = json.loads(answers.read_text())
    return rounds[1:]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def summarize(case: Case, rounds: Sequence[Seconds]) -> dict[str, object]:
    """Medians in ms, and ratios within a round with their range."""
    total = {way: [sum(each[way].values()) for each in rounds] for way in rounds[0]}
    summary: dict[str, object] = {
        "bytes_per_receiver": case.receiver_bytes,
        "bytes_moved_over_lower_bound": case.bytes_over_bound,
        "ms": {
            way: {phase: round(statistics.median(r[way][phase] for r in rounds) * 1e3, 1) for phase in rounds[0][way]}
            for way in rounds[0]
        },
    }
    ratios = {
        "pull of memcpy, not verified": [r["memcpy"]["copy"] / r["asyncrl"]["apply"] for r in rounds],
        "pull of memcpy, verified": [
            r["memcpy"]["copy"] / (r["asyncrl"]["verify"] + r["asyncrl"]["apply"]) for r in rounds
        ],
    }
    gathers = [way for way in ("gather", "gather, p2p") if way in total]
    if gathers:
        best = [min(total[way][index] for way in gathers) for index in range(len(rounds))]
        ratios["times faster than the best gather"] = [a / b for a, b in zip(best, total["asyncrl"], strict=True)]
    for way in ("megatron", "vllm"):
        if way in total:
            ratios[f"times faster than {way}"] = [a / b for a, b in zip(total[way], total["asyncrl"], strict=True)]
    for name, values in ratios.items():
        summary[name] = round(statistics.median(values), 3)
        summary[f"{name}, range"] = [round(min(values), 3), round(max(values), 3)]
    return summary


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--case", choices=sorted(CASES), action="append", help="may be given several times")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--way", action="append", help="only these (asyncrl and memcpy are always among them)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    results = {}
    for name in arguments.case or sorted(CASES):
        case = CASES[name]
        ways = ["asyncrl", "memcpy", *(w for w in case.ways if arguments.way is None or w in arguments.way)]
        results[name] = summarize(case, run_case(case, num_rounds=arguments.rounds, ways=ways))
        table = Table(title=f"{name}: medians of {arguments.rounds} rounds, {case.num_processes} processes")
        table.add_column("what")
        table.add_column("value", justify="right")
        for what, value in results[name].items():
            for phase, milliseconds in value.items() if isinstance(value, dict) else ():
                table.add_row(phase, ", ".join(f"{n} {ms:,.1f} ms" for n, ms in milliseconds.items()))
            if not isinstance(value, dict):
                table.add_row(what, str(value))
        Console().print(table)
    if arguments.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
