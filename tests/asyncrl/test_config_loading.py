"""Composition, interpolation and overrides; what is written down of a recipe; the recipes that are shipped."""

from __future__ import annotations

import dataclasses
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.config import load_recipe
from asyncrl.machine import Machine
from asyncrl.recipe_errors import RecipeError

CONFIGS = Path(__file__).parents[2] / "configs"
COPY = CONFIGS / "grpo_copy.yaml"
TWO_CORES = Machine(cores=(0, 1))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipe_loads_on_two_cores(path: Path) -> None:
    recipe = load_recipe(path, (), TWO_CORES).recipe
    assert recipe.run.name == path.stem
    assert recipe.num_devices_needed == 2


def test_every_recipe_names_the_schema_for_editors() -> None:
    files = [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("*/*.yaml")]
    assert files
    for file in files:
        schema = file.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
        assert (file.parent / schema).resolve() == CONFIGS / "recipe.schema.json"


def test_the_copy_recipe_is_the_one_that_learns() -> None:
    """FACTS section 4."""
    recipe = load_recipe(COPY, (), TWO_CORES).recipe
    assert recipe.trainer.prompts_per_step == 64
    assert recipe.trainer.samples_per_prompt == 8
    assert recipe.trainer.optimizer.lr == 1e-3
    assert recipe.trainer.optimizer.betas == (0.9, 0.95)
    assert recipe.trainer.lr_schedule.warmup_steps == 10
    assert recipe.schedule.max_staleness == 1
    assert recipe.max_prompt_tokens >= 7
    assert recipe.max_open_samples == 1024
    assert recipe.schedule.num_slots == 3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.optimizer.lr=3e-4", 3e-4),
        ("trainer.optimizer.lr=1.5E-2", 1.5e-2),
        ("trainer.optimizer.lr=1", 1.0),
        ("trainer.optimizer.lr=${trainer.optimizer.grad_clip}", 1.0),
    ],
)
def test_override_is_yaml_and_a_float_may_be_written_short(override: str, expected: float) -> None:
    assert load_recipe(COPY, (override,), TWO_CORES).recipe.trainer.optimizer.lr == expected


def test_later_overrides_win_and_lists_are_replaced() -> None:
    overrides = ("seed=1", "trainer.cpus=[0]", "seed=2", "trainer.cpus=[1]", "tracking.wandb.tags=[a,b]")
    recipe = load_recipe(COPY, overrides, TWO_CORES).recipe
    assert recipe.seed == 2
    assert recipe.trainer.cpus == (1,)
    assert recipe.tracking.wandb.tags == ("a", "b")


def test_a_task_can_be_exchanged_for_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n')
    overrides = ("data.train.task=null", "data.train.args=null", f"data.train.path={file}", "eval.every=0")
    assert load_recipe(COPY, overrides, TWO_CORES).recipe.data.train.path == str(file)


def test_defaults_are_merged_in_order_relative_to_their_file(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "one.yaml").write_text(f"defaults: [{COPY}]\nseed: 1\nrun: {{name: one}}\n")
    (tmp_path / "base" / "two.yaml").write_text("seed: 2\nrun: {name: '${tracking.wandb.project}-2'}\n")
    (tmp_path / "top.yaml").write_text("defaults: [base/one.yaml, base/two.yaml]\ntracking: {wandb: {project: p}}\n")
    recipe = load_recipe(tmp_path / "top.yaml", (), TWO_CORES).recipe
    assert recipe.seed == 2
    assert recipe.run.name == "p-2"
    assert recipe.trainer.num_steps == load_recipe(COPY, (), TWO_CORES).recipe.trainer.num_steps


def test_an_empty_file_with_overrides_is_a_recipe_that_lacks_everything(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(RecipeError, match=r"^model: missing"):
        load_recipe(tmp_path / "empty.yaml", ("seed=1",))


def test_no_secret_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCRL_TEST_ENTITY", "hunter2-team")
    monkeypatch.setenv("ASYNCRL_TEST_SEED", "17")
    overrides = (
        "tracking.wandb.entity=${oc.env:ASYNCRL_TEST_ENTITY}",
        "tracking.wandb.group=g-${tracking.wandb.entity}",
        "seed=${oc.decode:${oc.env:ASYNCRL_TEST_SEED}}",
        "tracking.wandb.tags=[plain, '${oc.env:ASYNCRL_TEST_ENTITY}']",
        r"run.name='a\${b}'",
    )
    loaded = load_recipe(COPY, overrides, TWO_CORES)
    assert loaded.recipe.tracking.wandb.entity == "hunter2-team"
    assert loaded.recipe.tracking.wandb.group == "g-hunter2-team"
    assert loaded.recipe.seed == 17
    assert loaded.recipe.run.name == "a${b}"
    assert "hunter2" not in loaded.unresolved_yaml
    assert "hunter2" not in str(loaded.public)
    assert "hunter2" not in repr(loaded)
    assert "${oc.env:ASYNCRL_TEST_ENTITY}" in loaded.unresolved_yaml
    assert loaded.public["seed"] == "${oc.decode:${oc.env:ASYNCRL_TEST_SEED}}"

    saved = tmp_path / "recipe.yaml"
    saved.write_text(loaded.unresolved_yaml)
    again = load_recipe(saved, (), TWO_CORES)
    assert again.recipe == loaded.recipe
    assert again.unresolved_yaml == loaded.unresolved_yaml


@settings(max_examples=20)  # three loads each
@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1),
    st.floats(min_value=1e-12, max_value=1e3),
    st.integers(0, 2**62),
)
def test_saved_recipe_is_the_same_recipe(
    tmp_path_factory: pytest.TempPathFactory, name: str, lr: float, seed: int
) -> None:
    """Whatever a text looks like in YAML ("no", "1e3", "${x}"), saving and loading gives the same recipe."""
    folder = tmp_path_factory.mktemp("saved")
    overrides = (f"trainer.optimizer.lr={lr!r}", f"seed={seed}")
    loaded = load_recipe(COPY, overrides, TWO_CORES)
    renamed = {**loaded.public, "run": {"name": name.replace("${", "$ {"), "dir": None}}
    from omegaconf import OmegaConf

    (folder / "first.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(renamed)), encoding="utf-8")
    first = load_recipe(folder / "first.yaml", (), TWO_CORES)
    assert first.recipe.run.name == name.replace("${", "$ {")
    assert (first.recipe.trainer.optimizer.lr, first.recipe.seed) == (lr, seed)
    (folder / "second.yaml").write_text(first.unresolved_yaml, encoding="utf-8")
    assert load_recipe(folder / "second.yaml", (), TWO_CORES).recipe == first.recipe


def test_a_recipe_is_frozen() -> None:
    loaded = load_recipe(COPY, (), TWO_CORES)
    with pytest.raises(ValidationError, match="frozen"):
        loaded.recipe.trainer.tp = 2  # type: ignore[misc]

    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.unresolved_yaml = ""  # type: ignore[misc]


def test_the_default_folder_has_name_and_time() -> None:
    started = datetime(2026, 11, 29, 19, 30, 5)  # noqa: DTZ001 - local time, as the user reads it
    assert load_recipe(COPY, (), TWO_CORES).recipe.run.folder(started) == Path("runs/grpo_copy-20261129-193005")
    assert load_recipe(COPY, ("run.dir=here",), TWO_CORES).recipe.run.folder(started) == Path("here")


def test_the_readmes_recipe_is_one(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    shutil.copytree(COPY.parent / "base", tmp_path / "base")
    (tmp_path / "mine.yaml").write_text(block)
    recipe = load_recipe(tmp_path / "mine.yaml", (), TWO_CORES).recipe
    assert recipe.trainer.num_steps == load_recipe(COPY, (), TWO_CORES).recipe.trainer.num_steps
