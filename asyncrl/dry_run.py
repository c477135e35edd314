"""What `--dry-run` prints: the resolved recipe, both layouts, the staleness bound, one publish. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.checks import notes
from asyncrl.config import LoadedRecipe
from asyncrl.machine import Machine, assign_cores, this_machine
from asyncrl.model_source import peek_config
from asyncrl.schema import Recipe


def describe(loaded: LoadedRecipe, machine: Machine | None = None) -> str:
    """Return the text of a dry run, several sections of plain lines. Nothing is started, written or downloaded.

    Args:
        loaded: from `load_recipe`; values of the environment are shown as their references.
        machine: where it would run; this one if None.
    """
    recipe, machine = loaded.recipe, machine if machine is not None else this_machine()
    hf_config = peek_config(recipe.model)
    sections = {
        "recipe": loaded.unresolved_yaml.splitlines(),
        "devices": list(_devices(recipe, machine)),
        "layouts": list(_layouts(recipe, hf_config)),
        "schedule": list(_schedule(recipe)),
        "publish": list(_publish(recipe, hf_config)),
        "notes": list(notes(recipe, machine)),
    }
    return "\n\n".join(
        "\n".join([f"{title}:", *(f"  {line}" for line in lines)]) for title, lines in sections.items() if lines
    )


def _devices(recipe: Recipe, machine: Machine) -> Iterator[str]:
    kind = "GPUs" if machine.num_gpus > 0 else "cores"
    slots = machine.num_devices if recipe.cluster.devices == "auto" else recipe.cluster.devices
    yield f"{recipe.num_devices_needed} workers on {slots} slots ({machine.num_devices} {kind} here)"
    cores = assign_cores(recipe, machine)
    for side, workers in (("training rank", cores.trainer), ("generator replica", cores.generator)):
        for index, ids in enumerate(workers):
            yield f"{side} {index}: " + ("not pinned" if ids is None else f"cores {', '.join(map(str, ids))}")


def _layouts(recipe: Recipe, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    if hf_config is None:
        yield f"known when {recipe.model.path} has been downloaded"
        return

    from engine.families import MegatronParallel, megatron_layout, vllm_layout

    parallel = MegatronParallel(tp=recipe.trainer.tp, pp=recipe.trainer.pp, dp=recipe.trainer.dp)
    trainer = megatron_layout(hf_config, parallel, dtype=recipe.trainer.dtype)
    generator = vllm_layout(hf_config, tp=recipe.generator.tp, dtype=recipe.generator.dtype)
    num_parameters = sum(spec.num_elements for spec in trainer.tensors.values())
    yield f"model: {num_parameters:,} parameters in {len(trainer.tensors)} tensors"
    yield f"trainer: {trainer.name}, {recipe.trainer.dtype}"
    for rank in range(trainer.num_ranks):
        place = parallel.coordinates(rank)
        where = f"tp {place.tensor}, pp {place.pipeline}, dp {place.data}"
        yield f"  rank {rank} ({where}): {len(trainer.params[rank])} parameters, {_mib(trainer.rank_bytes(rank))}"

    yield f"generator: {recipe.generator.num_replicas} x {generator.name}, {recipe.generator.dtype}"
    for rank in range(generator.num_ranks):
        yield f"  rank {rank}: {len(generator.params[rank])} parameters, {_mib(generator.rank_bytes(rank))}"


def _schedule(recipe: Recipe) -> Iterator[str]:
    bound, trainer = recipe.schedule.max_staleness, recipe.trainer
    yield f"staleness bound: {bound}, in versions; step s trains on samples of version max(0, s - {bound})"
    yield (
        f"batch: {trainer.prompts_per_step} prompts x {trainer.samples_per_prompt} samples = "
        f"{trainer.num_samples_per_step} a step, {trainer.num_samples_per_step // trainer.dp} a data-parallel rank"
    )
    yield f"open at once: at most {recipe.max_open_samples:,} samples of {bound + 1} steps"
    yield f"run: {trainer.num_steps} steps, {trainer.num_steps * trainer.num_samples_per_step:,} samples"


def _publish(recipe: Recipe, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    num_slots = recipe.schedule.num_slots
    if hf_config is None:
        yield f"{num_slots} versions are kept"
        return

    from engine.families import megatron_layout, vllm_layout
    from engine.plan import make_plan
    from engine.segments import store_bytes

    trainer, generator = recipe.trainer, recipe.generator
    plan = make_plan(
        megatron_layout(hf_config, tp=trainer.tp, pp=trainer.pp, dp=trainer.dp, dtype=trainer.dtype),
        vllm_layout(hf_config, tp=generator.tp, dtype=generator.dtype),
        bucket_bytes=recipe.publish.bucket_bytes,
    )
    yield f"one version: {plan.num_bytes:,} bytes ({_mib(plan.num_bytes)}) in {plan.num_buckets} buckets"
    yield f"read by all replicas: {generator.num_replicas} x {_mib(plan.num_bytes)}"
    total = store_bytes(plan, num_slots)
    yield f"weight store: max_staleness + 2 = {num_slots} versions, {_mib(total)} of shared memory, headers included"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"
