"""Notes, the machine and its cores, the schema for editors, and the dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.checks import CPU_HEAD_DIMS, check_model, check_recipe, notes
from asyncrl.config import load_recipe
from asyncrl.dry_run import describe
from asyncrl.machine import Machine, assign_cores, this_machine
from asyncrl.model_source import fresh_config
from asyncrl.recipe_errors import all_paths
from asyncrl.schema import Recipe, Section, json_schema, main

CONFIGS = Path(__file__).parents[2] / "configs"
COPY = CONFIGS / "grpo_copy.yaml"


def recipe_with(*overrides: str, num_cores: int = 64) -> Recipe:
    """Return grpo_copy.yaml with overrides, checked for a machine of many cores."""
    return load_recipe(COPY, overrides, Machine(cores=tuple(range(num_cores)))).recipe


def test_notes_say_what_is_slow_or_odd_but_works() -> None:
    assert notes(recipe_with(), Machine(cores=(0, 1))) == ()
    recipe = recipe_with(
        "trainer.num_steps=5", "schedule.max_staleness=4", "generator.dtype=bfloat16", "trainer.cpus=[0,1]",
        "generator.cpus=[1,2]", "generator.num_replicas=2",
    )  # fmt: skip
    assert notes(recipe, Machine(cores=(0, 1))) == (
        "3 workers share 2 cores: right, but slower than one a core",
        "trainer.lr_schedule.warmup_steps = 10 is not over within trainer.num_steps = 5",
        "schedule.max_staleness = 4: under GRPO's coupled clip tokens more than one version old learn worse",
        "trainer.dtype = float32, generator.dtype = bfloat16: their logprobs of the same tokens differ by the rounding",
        "trainer.cpus and generator.cpus share [1]: both sides run at once and slow down",
    )


@pytest.mark.parametrize("num_steps", [1, 3, 10])
def test_a_short_run_of_a_long_recipe_is_allowed(num_steps: int) -> None:
    """Scripts shorten runs by trainer.num_steps alone: a warm-up that is longer is a note, not an error."""
    assert recipe_with(f"trainer.num_steps={num_steps}").trainer.num_steps == num_steps


def test_head_widths_are_those_of_the_installed_vllm() -> None:
    source = subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    text = (Path(source) / "v1/attention/backends/cpu_attn.py").read_text()
    assert f"return {list(CPU_HEAD_DIMS)}" in text


def test_a_gpu_has_other_head_widths() -> None:
    recipe = recipe_with()
    config = fresh_config(recipe.model.fresh) | {"num_attention_heads": 4}
    assert check_model(recipe, config, Machine(cores=(0,), num_gpus=2)) == ()
    assert len(check_model(recipe, config, Machine(cores=(0,)))) == 1


def test_packed_float32_sequences_are_refused_on_a_gpu() -> None:
    machine = Machine(cores=(0, 1), num_gpus=2)
    (problem,) = check_recipe(recipe_with(), machine)
    assert (problem.path, problem.value) == ("trainer.dtype", "float32")
    assert check_recipe(recipe_with("trainer.dtype=bfloat16"), machine) == ()


def test_a_model_without_a_layout_is_refused() -> None:
    recipe = recipe_with()
    config = fresh_config(recipe.model.fresh) | {"model_type": "gpt2"}
    (problem,) = check_model(recipe, config, Machine(cores=(0, 1)))
    assert problem.path == "model"
    assert "no weight layout for model_type 'gpt2'" in problem.text


def test_trainer_and_generator_get_disjoint_cores() -> None:
    cores = assign_cores(recipe_with(), Machine(cores=(4, 7)))
    assert (cores.trainer, cores.generator) == (((4,),), ((7,),))


def test_a_synchronous_run_gives_each_side_all_cores() -> None:
    recipe = recipe_with("schedule.max_staleness=0", "trainer.threads=2", "generator.threads=2")
    cores = assign_cores(recipe, Machine(cores=(0, 1)))
    assert (cores.trainer, cores.generator) == (((0, 1),), ((0, 1),))


def test_explicit_cores_are_divided_or_shared_and_none_is_not_pinned() -> None:
    machine = Machine(cores=tuple(range(8)))
    cores = assign_cores(recipe_with("trainer.dp=2", "trainer.cpus=[0,1,2,3]", "generator.cpus=none"), machine)
    assert (cores.trainer, cores.generator) == (((0, 1), (2, 3)), (None,))
    cores = assign_cores(recipe_with("trainer.dp=2", "trainer.cpus=[5]", "generator.cpus=[6,7]"), machine)
    assert (cores.trainer, cores.generator) == (((5,), (5,)), ((6, 7),))


def test_one_core_is_not_divided() -> None:
    cores = assign_cores(recipe_with(), Machine(cores=(3,)))
    assert (cores.trainer, cores.generator) == ((None,), (None,))


def test_who_computes_on_a_gpu_is_pinned_only_where_the_recipe_says_so() -> None:
    machine = Machine(cores=(0, 1, 2, 3), num_gpus=2)
    cores = assign_cores(recipe_with("generator.cpus=[2,3]"), machine)
    assert (cores.trainer, cores.generator) == ((None,), ((2, 3),))


@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_automatic_cores_are_disjoint_and_exist(
    num_cores: int, dp: int, num_replicas: int, trainer_threads: int, generator_threads: int
) -> None:
    recipe = recipe_with(
        f"trainer.dp={dp}", "trainer.prompts_per_step=12", f"generator.num_replicas={num_replicas}",
        f"trainer.threads={trainer_threads}", f"generator.threads={generator_threads}",
    )  # fmt: skip
    cores = assign_cores(recipe, Machine(cores=tuple(range(num_cores))))
    trainer = [core for ids in cores.trainer for core in ids or ()]
    generator = [core for ids in cores.generator for core in ids or ()]
    assert (len(cores.trainer), len(cores.generator)) == (dp, num_replicas)
    assert trainer
    assert generator
    assert not set(trainer) & set(generator)
    assert set(trainer + generator) <= set(range(num_cores))
    if dp * trainer_threads + num_replicas * generator_threads <= num_cores:
        assert len(set(trainer)) == dp * trainer_threads
        assert len(set(generator)) == num_replicas * generator_threads


def test_this_machine_has_the_cores_that_we_may_use() -> None:
    assert set(this_machine().cores) == os.sched_getaffinity(0)


def test_every_field_is_documented() -> None:
    def sections(cls: type[Section]) -> list[type[Section]]:
        nested = [field.annotation for field in cls.model_fields.values()]
        found = [entry for entry in nested if isinstance(entry, type) and issubclass(entry, Section)]
        return [cls, *(inner for entry in found for inner in sections(entry))]

    for section in sections(Recipe):
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            assert field.description.endswith("."), f"{section.__name__}.{name}"


def test_names_that_scripts_rely_on() -> None:
    assert {"seed", "run.dir", "trainer.num_steps", "schedule.max_staleness", "tracking.wandb.mode"} <= set(
        all_paths(Recipe)
    )


def test_committed_json_schema_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == (CONFIGS / "recipe.schema.json").read_text()


def test_json_schema_takes_parts_interpolations_and_defaults() -> None:
    schema = json_schema()
    assert '"required"' not in json.dumps(schema)
    assert "defaults" in schema["properties"]
    seed = schema["properties"]["seed"]
    assert seed["anyOf"][1]["type"] == "string"
    assert seed["description"] == "Seed of everything random in the run."
    assert schema["additionalProperties"] is False


def test_editors_find_shipped_recipes_right_and_mistakes_wrong() -> None:
    import jsonschema
    import yaml

    validator = jsonschema.Draft202012Validator(json_schema())
    for file in [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("*/*.yaml")]:
        assert not list(validator.iter_errors(yaml.safe_load(file.read_text()))), file

    assert not list(validator.iter_errors({"seed": "${oc.decode:${oc.env:SEED}}", "run": {"dir": "${oc.env:DIR}"}}))
    for wrong in ({"sed": 1}, {"seed": -1}, {"schedule": {"order": "ready"}}, {"trainer": {"tp": "two"}}):
        assert list(validator.iter_errors(wrong)), wrong


def test_dry_run_shows_layouts_bound_and_bytes() -> None:
    loaded = load_recipe(COPY, ("trainer.tp=2", "trainer.pp=2", "cluster.devices=5"), Machine(cores=(0, 1)))
    text = describe(loaded, Machine(cores=(0, 1)))
    for expected in (
        "lr: 0.001",
        "5 workers on 5 slots (2 cores here)",
        "training rank 3: cores 0",
        "generator replica 0: cores 1",
        "model: 135,872 parameters in 26 tensors",
        "trainer: megatron tp=2 pp=2 dp=1, float32",
        "rank 3 (tp 1, pp 1, dp 0): ",
        "generator: 1 x vllm tp=1, float32",
        "staleness bound: 1, in versions; step s trains on samples of version max(0, s - 1)",
        "one version: 543,488 bytes (0.52 MiB) in 4 buckets",
        "weight store: max_staleness + 2 = 3 versions",
        "5 workers share 2 cores",
    ):
        assert expected in text


def test_dry_run_of_a_hub_model_downloads_nothing() -> None:
    loaded = load_recipe(COPY, ("model.fresh=null", "model.path=owner/name"), Machine(cores=(0, 1)))
    assert "known when owner/name has been downloaded" in describe(loaded, Machine(cores=(0, 1)))


def test_dry_run_hides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_TEST_SECRET", "hunter2")
    loaded = load_recipe(COPY, ("tracking.wandb.entity=${oc.env:ASYNCRL_TEST_SECRET}",), Machine(cores=(0, 1)))
    assert "hunter2" not in describe(loaded, Machine(cores=(0, 1)))


def test_dry_run_starts_no_heavyweight() -> None:
    code = (
        "import sys; from asyncrl.config import load_recipe; from asyncrl.dry_run import describe; "
        f"describe(load_recipe({str(COPY)!r}, ['cluster.devices=2'])); "
        "print(sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
