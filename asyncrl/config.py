"""From a YAML recipe and overrides to a checked `Recipe`, or to one clear line for each thing that is wrong.

Order: the files of `defaults:` (paths relative to the file that names them), the file itself, the overrides of the
command line; merged and interpolated by OmegaConf, validated by pydantic, then checked across fields.
A value that came out of the environment is never shown nor saved: its reference, `${oc.env:NAME}`, is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from asyncrl.checks import check_model, check_recipe
from asyncrl.machine import Machine, this_machine
from asyncrl.model_source import peek_config
from asyncrl.recipe_errors import Problem, RecipeError, describe_validation_error, find_written, hide_environment, show
from asyncrl.schema import Recipe
from asyncrl.user_error import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRecipe:
    """A checked recipe and what may be written down of it.

    Attributes:
        recipe: validated and interpolated; may hold secrets from the environment.
        unresolved_yaml: every field with its value, defaults included; a value that was written as an interpolation
            (`${oc.env:KEY}`) stays as it was written. Loading this text again gives the same recipe.
        public: the same as plain containers, for wandb's config and for the eye.
    """

    recipe: Recipe = field(repr=False)
    unresolved_yaml: str
    public: Mapping[str, Any]


def load_recipe(path: str | Path, overrides: Sequence[str] = (), machine: Machine | None = None) -> LoadedRecipe:
    """Read, merge, interpolate, validate and check a recipe.

    Args:
        path: a YAML file.
        overrides: `dotted.path=value` each, the value in YAML, for instance `trainer.optimizer.lr=3e-4`.
        machine: what to check against; this one if None.

    Raises:
        RecipeError: with one line for each problem.
    """
    from omegaconf import OmegaConf

    merged = _read_file(Path(path), ())
    for override in overrides:
        merged = cast("DictConfig", OmegaConf.merge(merged, _parse_override(override)))

    raw = cast("dict[str, Any]", OmegaConf.to_container(merged, resolve=False))
    resolved = _resolve(merged, raw)
    try:
        recipe = Recipe.model_validate_json(json.dumps(resolved))
    except ValidationError as error:
        lines = describe_validation_error(error, raw)
        raise RecipeError(*hide_environment(lines, raw, resolved)) from None

    problems = _check(recipe, machine if machine is not None else this_machine())
    if problems:
        raise RecipeError(*hide_environment((problem.describe(raw) for problem in problems), raw, resolved))

    public = cast("dict[str, Any]", _keep_interpolations(recipe.model_dump(mode="json"), raw))
    return LoadedRecipe(recipe=recipe, unresolved_yaml=OmegaConf.to_yaml(OmegaConf.create(public)), public=public)


def read_written(path: Path) -> dict[str, Any]:
    """Return a recipe file as it is written: references unresolved, nothing checked.

    Raises:
        RecipeError: it cannot be read.
    """
    from omegaconf import OmegaConf

    return cast("dict[str, Any]", OmegaConf.to_container(_read_file(path, ()), resolve=False))


def _check(recipe: Recipe, machine: Machine) -> tuple[Problem, ...]:
    """Check across fields, with the model's shape where it can be known without a download."""
    problems = check_recipe(recipe, machine)
    if (recipe.model.path is None) == (recipe.model.fresh is None):
        return problems

    try:
        hf_config = peek_config(recipe.model)
    except UserError as error:
        return (*problems, Problem(path="model.path", value=recipe.model.path, text=str(error)))

    return problems if hf_config is None else (*problems, *check_model(recipe, hf_config, machine))


def _read_file(path: Path, included_by: tuple[Path, ...]) -> DictConfig:
    """Read one file and the files of its `defaults:` list, merged in order, interpolations untouched."""
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    trail = "".join(f", in `defaults` of {parent}" for parent in reversed(included_by))
    if path.resolve() in [parent.resolve() for parent in included_by]:
        raise RecipeError(f"{path}: includes itself{trail}")

    try:
        loaded = OmegaConf.create(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}{trail}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text: byte {error.start}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}:{_describe_yaml_error(error)}") from None
    except OmegaConfBaseException as error:
        raise RecipeError(f"{path}: {str(error).splitlines()[0]}") from None

    if not isinstance(loaded, DictConfig):
        raise RecipeError(f"{path}: a recipe is a mapping of sections, this is a list")

    own = cast("dict[str, Any]", OmegaConf.to_container(loaded, resolve=False))
    defaults = own.pop("defaults", None)
    if defaults is None:
        defaults = []
    elif not isinstance(defaults, list) or not all(isinstance(item, str) for item in defaults):
        raise RecipeError(f"defaults = {show(defaults)}: must be a list of recipe files, relative to {path}")

    parts = [_read_file(path.parent / item, (*included_by, path)) for item in defaults]
    return cast("DictConfig", OmegaConf.merge(*parts, OmegaConf.create(own)))


def _describe_yaml_error(error: Exception) -> str:
    """Return "line:column: what" of a YAML error, on one line."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if problem.startswith("found duplicate key "):
        problem = f"duplicate key {problem.removeprefix('found duplicate key ')!r}"

    return f"{mark.line + 1}:{mark.column + 1}: {problem}" if mark is not None else f" {problem}"


def _parse_override(override: str) -> DictConfig:
    """Turn `a.b=value` into a nested config."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    path, equals, value = override.partition("=")
    if not equals or not all(part.strip() for part in path.split(".")):
        raise RecipeError(f"{override}: an override is dotted.path=value, for instance trainer.optimizer.lr=3e-4")

    try:
        return OmegaConf.from_dotlist([override])
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} = {value}: not YAML: {getattr(error, 'problem', error)}") from None
    except OmegaConfBaseException as error:
        raise RecipeError(f"{path} = {value}: {str(error).splitlines()[0]}") from None


def _resolve(config: DictConfig, raw: Mapping[str, Any]) -> object:
    """Return plain containers with every interpolation resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise RecipeError(f"{error.full_key}: must be given, the recipe says ???") from None
    except OmegaConfBaseException as error:
        # OmegaConf's other messages quote what they choke on, which may be a secret of the environment.
        unset = re.search(r"Environment variable '\w+' not found", str(error))
        text = unset.group() if unset else "this interpolation cannot be resolved"
        if isinstance(error, InterpolationKeyError):
            text = str(error).splitlines()[0]

        raise RecipeError(f"{error.full_key} = {show(find_written(raw, str(error.full_key)))}: {text}") from None


def _keep_interpolations(resolved: object, raw: object) -> object:
    """Return `resolved` with each value that `raw` wrote as an interpolation put back as it was written."""
    if isinstance(raw, str) and "${" in raw:
        return raw

    if isinstance(resolved, dict) and isinstance(raw, dict):
        return {key: _keep_interpolations(value, raw.get(key)) for key, value in resolved.items()}

    if isinstance(resolved, list) and isinstance(raw, list):
        return [_keep_interpolations(value, before) for value, before in zip(resolved, raw, strict=True)]

    return resolved
