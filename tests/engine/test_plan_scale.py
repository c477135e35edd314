"""Planning for thousands of ranks: its time, its memory, and how both grow."""

from __future__ import annotations

import cProfile
import json
import pstats
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.families import megatron_layout, vllm_layout
from engine.placement import repeated
from engine.plan import make_plan
from engine.plan_command import read_model

ROOT = Path(__file__).parents[2]
TRAIN = "tp=8,pp=16,dp=4,ep=32,etp=1,layers=" + "-".join(["4"] * 15 + ["1"])
INFER = {
    "one replica of 512": (["--infer", "tp=32,pp=16,ep=on"], 512),
    "16 replicas of 32 that share a plan": (["--infer", "tp=32,ep=on"], 32),
    "16 replicas of 32, each planned, 8 devices a node": (
        ["--infer", "tp=32,ep=on,replicas=16", "--nodes", "128"],
        512,
    ),
}
MEASURED = """
import json, resource, sys
from engine.plan_command import main
status = main(sys.argv[1:])
print(json.dumps([status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("infer", INFER)
def test_deepseek_v3_from_512_to_512_ranks(infer: str) -> None:
    """At most 10 s to make the layouts and the plan, and 2 GB for the whole command.

    Seconds of CPU time (one thread, no waiting), which do not grow while the machine does something else too.
    """
    arguments, num_ranks = INFER[infer]
    command = [sys.executable, "-c", MEASURED, "--model", "DeepSeek-V3", "--train", TRAIN, *arguments]
    done = subprocess.run([*command, "--quiet", "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    figures, (status, peak_bytes) = map(json.loads, done.stdout.splitlines())
    assert status == 0
    assert (figures["source_ranks"], figures["target_ranks"]) == (512, num_ranks)
    assert figures["bytes_over_bound"] == 1.0
    assert figures["busiest_over_best"] <= 1.05
    assert figures["cpu_s"] <= 10
    assert peak_bytes <= 2e9


def calls_and_copies(num_layers: int, replicas: int) -> tuple[int, int]:
    """Function calls that a plan takes, which no load of the machine changes, and its copies."""
    config: dict[str, Any] = read_model("Qwen3-235B-A22B") | {"num_hidden_layers": num_layers, "num_experts": 16}
    source = megatron_layout(config, tp=4, pp=2, dp=4, ep=8, etp=1)
    target = repeated(vllm_layout(config, tp=4, ep=True), replicas)
    profile = cProfile.Profile()
    plan = profile.runcall(make_plan, source, target, bucket_bytes=64 << 20)
    return pstats.Stats(profile).total_calls, plan.num_copies  # type: ignore[attr-defined]


def test_cost_grows_no_faster_than_the_copies() -> None:
    calls, copies = calls_and_copies(4, 1)
    for num_layers, replicas in ((16, 1), (4, 4)):
        more_calls, more_copies = calls_and_copies(num_layers, replicas)
        assert more_copies > 3 * copies
        assert more_calls / more_copies <= 1.05 * calls / copies
