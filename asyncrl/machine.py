"""What this machine has, and which core each worker gets. Asks the operating system, never torch or Ray."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from asyncrl.schema import Cpus, Recipe
from engine.worker_process import divide_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Cores that this process may use, by id, and the GPUs that the installed torch can use."""

    cores: tuple[int, ...]
    num_gpus: int = 0

    @property
    def num_devices(self) -> int:
        """Worker slots that `cluster.devices: auto` stands for."""
        return self.num_gpus if self.num_gpus > 0 else len(self.cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Core ids of every worker; None: not pinned.

    Attributes:
        trainer: one entry a training rank.
        generator: one entry a replica.

    Example: one rank and one replica on two cores give trainer ((0,),), generator ((1,),).
    """

    trainer: tuple[tuple[int, ...] | None, ...]
    generator: tuple[tuple[int, ...] | None, ...]


def this_machine() -> Machine:
    """Look at the machine. GPUs count only if the installed torch is not a CPU build."""
    return Machine(cores=tuple(sorted(os.sched_getaffinity(0))), num_gpus=0 if _is_cpu_stack() else _num_gpus())


def _is_cpu_stack() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _num_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])

    driver = Path("/proc/driver/nvidia/gpus")
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def assign_cores(recipe: Recipe, machine: Machine) -> Cores:
    """Give every worker its cores.

    `auto`: trainer and generator get disjoint cores, `threads` for each worker where there are enough, else a share
    in proportion with at least one core a side, which the workers of that side share. The sides of a synchronous run
    (max_staleness 0) take turns, so each may have all cores. A single core is not divided and nothing is pinned; nor
    is a worker that computes on a GPU: `threads` says nothing about the cores that keep a GPU busy.
    An explicit list is divided evenly among the side's workers if it can be, shared otherwise.
    The ranks of a tensor-parallel replica wait for each other without giving up their core (on one core a decode step
    takes 34 ms for 6). If their side has too few for each to have its own, `auto` gives a replica all cores.
    """
    trainer, generator, cores = recipe.trainer, recipe.generator, machine.cores
    num_trainer = trainer.world_size * trainer.threads
    per_replica = generator.tp * generator.threads
    num_generator = generator.num_replicas * per_replica
    split: tuple[tuple[int, ...], tuple[int, ...]]
    if len(cores) < 2 or machine.num_gpus > 0:
        split = ((), ())
    elif recipe.schedule.max_staleness == 0:
        split = (cores, cores)
    elif num_trainer + num_generator <= len(cores):
        split = (cores[:num_trainer], cores[num_trainer : num_trainer + num_generator])
    else:
        cut = round(len(cores) * num_trainer / (num_trainer + num_generator))
        cut = min(max(cut, 1), len(cores) - 1)
        split = (cores[:cut], cores[cut:])

    if generator.tp > 1 and split[1] and len(split[1]) < num_generator:
        split = (split[0], cores)

    return Cores(
        trainer=_divide(trainer.cpus, split[0], trainer.world_size, trainer.threads),
        generator=_divide(generator.cpus, split[1], generator.num_replicas, per_replica),
    )


def _divide(
    cpus: Cpus, automatic: tuple[int, ...], num_workers: int, threads: int
) -> tuple[tuple[int, ...] | None, ...]:
    """Return each worker's cores: its own slice where there are enough, otherwise all of the side's."""
    if cpus == "none" or (cpus == "auto" and len(automatic) == 0):
        return (None,) * num_workers

    return divide_cores(automatic if isinstance(cpus, str) else cpus, num_workers, threads)
