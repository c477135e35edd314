"""Combinations across a recipe's fields that cannot work, each with both values and the cure. Pure: no torch, no Ray.

What is refused because it would be *silently* wrong rather than fail:
- prompts and responses longer than the model's positions (the rotary embedding extrapolates without a word);
- top_p and top_k other than off: the generator's logprobs are then not those of the distribution that is trained;
- one sample a prompt: every advantage is 0, the run "trains" and never learns;
- a head width that vLLM's CPU attention does not list;
- evaluation on the file that is trained on.
What Megatron-Core 0.16 gets silently wrong is not expressible: a recipe has no key for virtual pipeline stages (batched
point-to-point), for experts and their tensor parallelism (weights drift apart with TP=2, ETP=1), for sequence or
context parallelism, for `overlap_param_gather` (stale parameters at a publish), nor for the formats of the optimizer's
checkpoint (`dp_reshardable` resumes wrong); the one family is dense, so no model brings them in either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.machine import Machine
from asyncrl.recipe_errors import Problem, show
from asyncrl.schema import Cpus, Recipe, Source
from engine.families import megatron_layout, vllm_layout
from engine.layout import LayoutError

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend.get_supported_head_sizes, vLLM 0.32."""

_IMPORT_PATH = re.compile(r"[^:]+:\w+")
_FIXED = re.compile(r"(model|data)\.|trainer\.prompts_per_step$")  # in a resumed run


def check_recipe(recipe: Recipe, machine: Machine) -> tuple[Problem, ...]:
    """Return everything that is impossible in a recipe, whatever the model."""
    return (
        *_check_sources(recipe),
        *_check_batch(recipe),
        *_check_lengths(recipe),
        *_check_sampling(recipe),
        *_check_devices(recipe, machine),
    )


def check_model(recipe: Recipe, hf_config: Mapping[str, Any], machine: Machine) -> tuple[Problem, ...]:
    """Return what is impossible with this model.

    Args:
        recipe: the recipe.
        hf_config: the content of the model's config.json (of a fresh one: `model_source.fresh_config`).
        machine: where it shall run.
    """
    problems = (*_check_shape(recipe, hf_config, machine), *_check_parallel(recipe, hf_config))
    return problems if problems else tuple(_check_layouts(recipe, hf_config))


def check_resume(begun: Mapping[str, Any], public: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Return what a resumed run may not change: its steps would mean other prompts, or its weights another model.

    Args:
        begun: what the run's folder says, references to the environment unresolved.
        public: the same with the command line's overrides (`LoadedRecipe.public`).
    """
    then, now = _leaves("", begun), _leaves("", public)
    changed = [path for path in {**then, **now} if _FIXED.match(path) and then.get(path) != now.get(path)]
    return tuple(
        Problem(
            path=path,
            value=now.get(path),
            text=f"the run was begun with {show(then.get(path))}; keep that, or begin anew",
        )
        for path in changed
    )


def _leaves(path: str, value: object) -> dict[str, object]:
    """Dotted path -> value, for every value of nested sections that is not None."""
    if not isinstance(value, Mapping):
        return {path: value} if value is not None else {}

    prefix = f"{path}." if path else ""
    return {leaf: own for key, part in value.items() for leaf, own in _leaves(f"{prefix}{key}", part).items()}


def notes(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    """Return what works but deserves a word, one line each."""
    return tuple(_notes(recipe, machine))


def _check_sources(recipe: Recipe) -> Iterator[Problem]:
    """Exactly one of two ways to name a model and a source; files that exist; import paths that can be one."""
    model = recipe.model
    if (model.path is None) == (model.fresh is None):
        both = model.path is not None
        cure = "model.fresh=null keeps the path" if both else "a fresh one is model.fresh: {hidden_size: 64, ...}"
        value = {"path": model.path, "fresh": "..." if both else None}
        yield Problem(path="model", value=value, text=f"give exactly one of model.path and model.fresh; {cure}")

    if model.revision is not None and model.path is None:
        yield Problem(path="model.revision", value=model.revision, text="only a hub id in model.path has revisions")

    yield from _check_source("data.train", recipe.data.train)
    if recipe.data.eval is not None:
        yield from _check_source("data.eval", recipe.data.eval)

    train = recipe.data.train
    if recipe.data.eval is None and train.path is not None and recipe.eval.every > 0:
        text = f"data.train is a file ({train.path}), so data.eval must name the held-out prompts, or eval.every=0"
        yield Problem(path="eval.every", value=recipe.eval.every, text=text)

    if recipe.data.eval is not None and train.path is not None and train.path == recipe.data.eval.path:
        text = "the same file as data.train.path: evaluation prompts must not occur in training"
        yield Problem(path="data.eval.path", value=recipe.data.eval.path, text=text)

    yield from _check_import_path("reward.function", recipe.reward.function)


def _check_source(path: str, source: Source) -> Iterator[Problem]:
    if (source.path is None) == (source.task is None):
        value = {"path": source.path, "task": source.task}
        cure = f"{path}.task=null keeps the path" if source.path is not None else f'{path}.task="asyncrl.tasks:copy"'
        yield Problem(path=path, value=value, text=f"give exactly one of {path}.path and {path}.task; {cure}")

    if source.path is not None:
        file = Path(source.path)
        if file.suffix not in (".jsonl", ".parquet"):
            yield Problem(path=f"{path}.path", value=source.path, text="must end in .jsonl or .parquet")
        elif not file.is_file():
            yield Problem(path=f"{path}.path", value=source.path, text=f"no such file in {Path.cwd()}")

        if source.args and source.task is None:
            yield Problem(path=f"{path}.args", value=source.args, text=f"a file takes no arguments; {path}.args=null")

    if source.task is not None:
        yield from _check_import_path(f"{path}.task", source.task)


def _check_import_path(path: str, value: str) -> Iterator[Problem]:
    if not _IMPORT_PATH.fullmatch(value):
        text = 'must be an import path "module:function" or "path/to/file.py:function"'
        yield Problem(path=path, value=value, text=text)


def _check_batch(recipe: Recipe) -> Iterator[Problem]:
    trainer = recipe.trainer
    if trainer.num_samples_per_step % trainer.dp != 0:
        text = (
            f"must divide the batch, trainer.prompts_per_step * trainer.samples_per_prompt = "
            f"{trainer.prompts_per_step} * {trainer.samples_per_prompt} = {trainer.num_samples_per_step} samples"
        )
        yield Problem(path="trainer.dp", value=trainer.dp, text=text)

    if trainer.samples_per_prompt < 2:
        text = "GRPO compares the samples of one prompt and needs at least 2; with 1 every advantage is 0"
        yield Problem(path="trainer.samples_per_prompt", value=trainer.samples_per_prompt, text=text)


def _check_lengths(recipe: Recipe) -> Iterator[Problem]:
    generator, trainer = recipe.generator, recipe.trainer
    if generator.max_new_tokens >= generator.max_model_len:
        text = f"leaves no room for a prompt within generator.max_model_len = {generator.max_model_len}; raise that"
        yield Problem(path="generator.max_new_tokens", value=generator.max_new_tokens, text=text)

    if trainer.micro_batch_tokens < generator.max_model_len:
        text = f"must hold the longest sequence, generator.max_model_len = {generator.max_model_len}"
        yield Problem(path="trainer.micro_batch_tokens", value=trainer.micro_batch_tokens, text=text)


def _check_sampling(recipe: Recipe) -> Iterator[Problem]:
    why = "would make the generator's logprobs those of a cut distribution, not of the one that is trained"
    if recipe.generator.top_p != 1.0:
        yield Problem(path="generator.top_p", value=recipe.generator.top_p, text=f"{why}; only 1.0 (off) for now")

    if recipe.generator.top_k != 0:
        yield Problem(path="generator.top_k", value=recipe.generator.top_k, text=f"{why}; only 0 (off) for now")


def _check_devices(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    trainer, generator, cluster = recipe.trainer, recipe.generator, recipe.cluster
    needed = recipe.num_devices_needed
    there = machine.num_devices if cluster.devices == "auto" else cluster.devices
    if needed > there and not (cluster.devices == "auto" and cluster.address is not None):
        found = f" ({there} here)" if cluster.devices == "auto" else ""
        text = (
            f"too few{found}: {needed} workers, {trainer.world_size} training ranks (tp {trainer.tp} * pp {trainer.pp} "
            f"* dp {trainer.dp}) and {generator.num_replicas} * {generator.tp} for the generator; "
        )
        text += f"cluster.devices={needed} lets them share" if machine.num_gpus == 0 else f"it takes {needed} GPUs"
        yield Problem(path="cluster.devices", value=cluster.devices, text=text)

    if machine.num_gpus > 0 and trainer.dtype == "float32":
        text = "Transformer Engine has no attention for packed sequences in it; trainer.dtype=bfloat16 on a GPU"
        yield Problem(path="trainer.dtype", value=trainer.dtype, text=text)

    for name, cpus in (("trainer", trainer.cpus), ("generator", generator.cpus)):
        if isinstance(cpus, str):
            continue

        missing = sorted(set(cpus) - set(machine.cores)) if cluster.address is None else []
        if missing or not cpus or len(set(cpus)) < len(cpus):
            text = f"must be different cores that this process may use: {list(machine.cores)}"
            yield Problem(path=f"{name}.cpus", value=list(cpus), text=text)


def _check_shape(recipe: Recipe, hf_config: Mapping[str, Any], machine: Machine) -> Iterator[Problem]:
    """The shape in itself, and the length that the model is made for."""
    hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    kv_heads = hf_config["num_key_value_heads"]
    if hidden % heads != 0:
        text = f"must divide the model's hidden_size = {hidden}"
        yield Problem(path=_model_path(recipe, "num_attention_heads"), value=heads, text=text)
    elif machine.num_gpus == 0 and hidden // heads not in CPU_HEAD_DIMS:
        text = (
            f"gives heads of width {hidden} / {heads} = {hidden // heads}; vLLM's CPU attention has "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}"
        )
        yield Problem(path=_model_path(recipe, "num_attention_heads"), value=heads, text=text)

    if heads % kv_heads != 0:
        text = f"must divide the model's num_attention_heads = {heads}"
        yield Problem(path=_model_path(recipe, "num_key_value_heads"), value=kv_heads, text=text)

    longest = hf_config["max_position_embeddings"]
    if recipe.generator.max_model_len > longest:
        text = f"longer than the model's max_position_embeddings = {longest}"
        yield Problem(path="generator.max_model_len", value=recipe.generator.max_model_len, text=text)


def _check_parallel(recipe: Recipe, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    trainer = recipe.trainer
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if hf_config[name] % trainer.tp != 0:
            text = f"must divide the model's {name} = {hf_config[name]}"
            yield Problem(path="trainer.tp", value=trainer.tp, text=text)

    tp = recipe.generator.tp
    for name in ("num_attention_heads", "intermediate_size"):
        if hf_config[name] % tp != 0:
            yield Problem(path="generator.tp", value=tp, text=f"must divide the model's {name} = {hf_config[name]}")

    kv_heads = hf_config["num_key_value_heads"]
    if kv_heads % tp != 0 and tp % kv_heads != 0:
        text = f"must divide the model's num_key_value_heads = {kv_heads}, or be a multiple: ranks then share a head"
        yield Problem(path="generator.tp", value=tp, text=text)

    layers = hf_config["num_hidden_layers"]
    if layers % trainer.pp != 0:
        text = f"must divide the model's num_hidden_layers = {layers}: every stage has as many"
        yield Problem(path="trainer.pp", value=trainer.pp, text=text)


def _check_layouts(recipe: Recipe, hf_config: Mapping[str, Any]) -> Iterator[Problem]:
    """What the resharding engine has no layout for."""
    trainer, generator = recipe.trainer, recipe.generator
    try:
        megatron_layout(hf_config, tp=trainer.tp, pp=trainer.pp, dp=trainer.dp, dtype=trainer.dtype)
        vllm_layout(hf_config, tp=generator.tp, dtype=generator.dtype)
    except LayoutError as error:
        yield Problem(path="model", value=hf_config.get("model_type"), text=str(error))


def _model_path(recipe: Recipe, key: str) -> str:
    """Where the user can change a key of the model's shape."""
    return f"model.fresh.{key}" if recipe.model.fresh is not None else "model.path"


def _notes(recipe: Recipe, machine: Machine) -> Iterator[str]:
    trainer, generator, cluster = recipe.trainer, recipe.generator, recipe.cluster
    if machine.num_gpus == 0 and cluster.address is None and recipe.num_devices_needed > len(machine.cores):
        yield f"{recipe.num_devices_needed} workers share {len(machine.cores)} cores: right, but slower than one a core"

    warmup = trainer.lr_schedule.warmup_steps
    if warmup >= trainer.num_steps:
        yield f"trainer.lr_schedule.warmup_steps = {warmup} is not over within trainer.num_steps = {trainer.num_steps}"

    if recipe.schedule.max_staleness > 1:
        yield (
            f"schedule.max_staleness = {recipe.schedule.max_staleness}: under GRPO's coupled clip tokens more than one "
            "version old learn worse"
        )

    if trainer.dtype != generator.dtype:
        yield (
            f"trainer.dtype = {trainer.dtype}, generator.dtype = {generator.dtype}: their logprobs of the same tokens "
            "differ by the rounding"
        )

    shared = _listed(trainer.cpus) & _listed(generator.cpus)
    if shared and recipe.schedule.max_staleness > 0:
        yield f"trainer.cpus and generator.cpus share {show(sorted(shared))}: both sides run at once and slow down"


def _listed(cpus: Cpus) -> set[int]:
    """Return the cores of an explicit list; none for `auto` and `none`."""
    return set() if isinstance(cpus, str) else set(cpus)
