"""How much a pipelined run gains over a synchronous one, and how far it is from the ideal. Side by side in one run.

For each recipe the same work is done, in many short rounds, by

    pipelined      max_staleness 1, each side pinned to its own core
    synchronous    max_staleness 0, the same workers (one thread a side)
    synchronous 2  max_staleness 0, other workers with two threads each, free to use both cores
    generator      the pipelined run's generators alone: the same waves, one after the other
    trainer        the pipelined run's trainer alone: the same batches, one after the other
    both           the last two at the same time, neither waiting for the other

`ideal` is the slower of generator and trainer: no schedule can be faster with these workers. `of_ideal` is the
pipelined rate over it, `speedup` the pipelined rate over that of the better synchronous one; ratios of medians over the
rounds, with the 90 % interval of a bootstrap over the rounds. Rates are of the steady state: a schedule's first wave is
left out. `of_both` is the pipelined rate over the slower side's of `both`: what two busy cores cost each other, and
what a shared machine's moods cost whoever needs both at once, is in it; the rest of it is the scheduler's.

    python benchmarks/overlap.py                       # both recipes
    python benchmarks/overlap.py --recipe configs/overlap_10m.yaml --rounds 5 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from overlap_bench import bench
from rich.console import Console
from rich.table import Table

from asyncrl.config import load_recipe
from asyncrl.fleet import cluster_for
from asyncrl.idle import IdleShares
from asyncrl.machine import this_machine
from asyncrl.model_source import materialize

CONFIGS = Path(__file__).parents[1] / "configs"
DEFAULT_RECIPES = ("overlap_balanced.yaml", "overlap_unbalanced.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Steps per second of one round."""

    pipelined: float
    synchronous: float
    synchronous_2: float
    generator: float
    trainer: float
    both: float
    idle: IdleShares


async def measure(path: Path, *, num_rounds: int, num_steps: int) -> list[Round]:
    """Run all five ways on one recipe, round by round; the first round warms up and is not reported."""
    recipe, machine = load_recipe(path).recipe, this_machine()
    room = [f"cluster.devices={2 * recipe.num_devices_needed}"]
    free = [*room, "trainer.threads=2", "generator.threads=2", "trainer.cpus=none", "generator.cpus=none"]
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        model = materialize(recipe.model, recipe.seed, Path(folder) / "model")
        async with (
            cluster_for(load_recipe(path, room).recipe, machine) as cluster,
            bench(path, room, cluster, model) as pinned,
            bench(path, free, cluster, model) as two_threads,
        ):
            gc.collect()
            gc.freeze()
            for index in range(num_rounds + 1):
                pipelined, idle = await pinned.schedule(1, num_steps)
                generator = await pinned.generator_alone(num_steps)
                trainer = await pinned.trainer_alone(num_steps)
                both = await pinned.both(num_steps)
                synchronous, _ = await pinned.schedule(0, num_steps)
                synchronous_2, _ = await two_threads.schedule(0, num_steps)
                rounds.append(
                    Round(
                        pipelined=pipelined,
                        synchronous=synchronous,
                        synchronous_2=synchronous_2,
                        generator=generator,
                        trainer=trainer,
                        both=both,
                        idle=idle,
                    )
                )
                print(f"{path.stem}: round {index} of {num_rounds}", file=sys.stderr, flush=True)
    return rounds[1:]


def summarize(rounds: Sequence[Round]) -> dict[str, float | list[float]]:
    """Medians over the rounds, and ratios of medians with their 90 % intervals."""

    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 4)

    summary: dict[str, float | list[float]] = {
        "pipelined_steps_per_s": median([r.pipelined for r in rounds]),
        "synchronous_steps_per_s": median([r.synchronous for r in rounds]),
        "synchronous_2_threads_steps_per_s": median([r.synchronous_2 for r in rounds]),
        "generator_alone_steps_per_s": median([r.generator for r in rounds]),
        "trainer_alone_steps_per_s": median([r.trainer for r in rounds]),
        "both_steps_per_s": median([r.both for r in rounds]),
        "trainer_idle": median([r.idle.trainer_idle or 0.0 for r in rounds]),
        "generator_idle": median([r.idle.generator_idle or 0.0 for r in rounds]),
    }
    for name, ratio in {"speedup": _speedup, "of_ideal": _of_ideal, "of_both": _of_both}.items():
        summary[name] = round(ratio(rounds), 4)
        summary[f"{name}_interval"] = _interval(rounds, ratio)
    return summary


def _speedup(rounds: Sequence[Round]) -> float:
    control = max(_median(rounds, "synchronous"), _median(rounds, "synchronous_2"))
    return _median(rounds, "pipelined") / control


def _of_ideal(rounds: Sequence[Round]) -> float:
    return _median(rounds, "pipelined") / min(_median(rounds, "generator"), _median(rounds, "trainer"))


def _of_both(rounds: Sequence[Round]) -> float:
    return _median(rounds, "pipelined") / _median(rounds, "both")


def _median(rounds: Sequence[Round], name: str) -> float:
    return statistics.median(getattr(r, name) for r in rounds)


def _interval(rounds: Sequence[Round], ratio: Callable[[Sequence[Round]], float]) -> list[float]:
    """The middle 90 % of a ratio over 2,000 draws of as many rounds, with replacement; the draws have a fixed seed."""
    draw = random.Random(0)
    values = sorted(ratio(draw.choices(rounds, k=len(rounds))) for _ in range(2000))
    return [round(values[100], 3), round(values[-101], 3)]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--recipe", type=Path, action="append", help="may be given several times")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, help="steps of one schedule; the recipe's trainer.num_steps if left out")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.steps is not None and arguments.steps < 2):
        parser.error("--rounds must be at least 1, --steps at least 2: the first step only fills the pipeline")
    results = {}
    for path in arguments.recipe or [CONFIGS / name for name in DEFAULT_RECIPES]:
        num_steps = arguments.steps if arguments.steps is not None else load_recipe(path).recipe.trainer.num_steps
        rounds = anyio.run(lambda: measure(path, num_rounds=arguments.rounds, num_steps=num_steps))  # noqa: B023
        results[path.stem] = summarize(rounds) | {"rounds": arguments.rounds, "steps": num_steps}
        table = Table(title=f"{path.stem}: medians of {arguments.rounds} rounds of {num_steps} steps")
        table.add_column("what")
        table.add_column("value", justify="right")
        for name, value in results[path.stem].items():
            table.add_row(name.replace("_", " "), str(value))
        Console().print(table)
    if arguments.json:
        print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
