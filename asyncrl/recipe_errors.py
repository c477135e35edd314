"""What is wrong with a recipe, one line each: the dotted path, the value, what is allowed, the nearest known key.

A value that was written as an interpolation is shown as it was written: it may be a secret of the environment.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from asyncrl.schema import Recipe, Section
from asyncrl.user_error import UserError

_LONGEST_VALUE = 80


class RecipeError(UserError):
    """A recipe that cannot be run. `str()` is one line for each problem."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One impossible setting.

    Attributes:
        path: dotted path of the key to change, for instance "trainer.tp".
        value: what it is set to.
        text: what is wrong, with the other value of a pair, and the cure.
    """

    path: str
    value: object
    text: str

    def describe(self, raw: Mapping[str, Any]) -> str:
        """Return the line for the user; `raw` is the recipe before interpolation."""
        written = find_written(raw, self.path)
        return f"{self.path} = {show(written if written is not None else self.value)}: {self.text}"


def show(value: object) -> str:
    """Return a value as a recipe would write it, cut to one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def find_written(raw: Mapping[str, Any], path: str) -> str | None:
    """Return the interpolation that gave the value at `path` or a section above it; None if it was written plainly."""
    value: Any = raw
    for part in re.split(r"[.\[\]]+", path):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]

        if isinstance(value, str):
            return value if "${" in value else None

    return None


def describe_validation_error(error: ValidationError, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line for each key that pydantic refused."""
    lines = {}
    for details in error.errors(include_url=False, include_context=False):
        path, section, key = _locate(details["loc"])
        if path not in lines:
            lines[path] = _describe(details, path, section, key, raw)

    return tuple(lines.values())


def hide_environment(lines: Iterable[str], raw: object, resolved: object) -> tuple[str, ...]:
    """Replace every text that came out of the environment by its reference, wherever a line quotes it."""
    references = dict(_environment_values(raw, resolved))
    hidden = []
    for line in lines:
        for value in sorted(references, key=len, reverse=True):
            line = line.replace(value, references[value])

        hidden.append(line)
    return tuple(hidden)


def _environment_values(raw: object, resolved: object) -> Iterator[tuple[str, str]]:
    """Yield (value, reference) of every text, two characters or more, that the environment gave."""
    if isinstance(raw, str) and "oc.env" in raw:
        yield from ((value, raw) for value in _texts(resolved) if len(value) > 1)
    elif isinstance(raw, Mapping) and isinstance(resolved, Mapping):
        for key, value in raw.items():
            yield from _environment_values(value, resolved.get(key))
    elif isinstance(raw, list) and isinstance(resolved, list):
        for before, after in zip(raw, resolved, strict=True):
            yield from _environment_values(before, after)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(entry)


def _locate(loc: Sequence[int | str]) -> tuple[str, type[Section], str]:
    """Return the dotted path of the refused key, its section and its name.

    What pydantic adds below a key (the members of a union, places in a list) is left off.
    """
    section: type[Section] = Recipe
    parts: list[str] = []
    for part in map(str, loc):
        parts.append(part)
        field = section.model_fields.get(part)
        nested = _nested_section(field.annotation) if field is not None else None
        if nested is None or len(parts) == len(loc):
            break

        section = nested

    return ".".join(parts), section, parts[-1] if parts else ""


def _nested_section(annotation: object) -> type[Section] | None:
    """Return the section class in an annotation such as `FreshModel | None`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate

    return None


def _describe(details: ErrorDetails, path: str, section: type[Section], key: str, raw: Mapping[str, Any]) -> str:
    if details["type"] == "extra_forbidden":
        return f"{path} = {_shown(details, path, raw)}: unknown key; {_suggest(path, section, key)}"

    schema = section.model_json_schema(mode="validation")
    if key not in schema["properties"]:
        return f"{path or 'recipe'}: {details['msg']}"

    node = schema["properties"][key]
    allowed = _allowed(node, schema.get("$defs", {}))
    if details["type"] == "missing" and len(details["loc"]) == path.count(".") + 1:
        return f"{path}: missing; must be {allowed}"

    value = _value_at(raw, path)
    if value in node.get("not_yet", ()):
        return f"{path} = {show(value)}: not available yet; must be {allowed}"

    hint = ""
    if "oc.env" in (find_written(raw, path) or ""):
        hint = "; the environment gives text: ${oc.decode:${oc.env:NAME}} makes it a number or a list"
    elif isinstance(value, int | float) and any(_is_free_text(part) for part in (node, *node.get("anyOf", ()))):
        hint = "; put it in quotes"

    return f"{path} = {_shown(details, path, raw)}: must be {allowed}{hint}"


def _shown(details: ErrorDetails, path: str, raw: Mapping[str, Any]) -> str:
    """Return the refused value as it was written."""
    written = find_written(raw, path)
    return show(written if written is not None else _value_at(raw, path))


def _value_at(raw: Mapping[str, Any], path: str) -> object:
    value: Any = raw
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None

    return value


def _suggest(path: str, section: type[Section], key: str) -> str:
    """Name the nearest known key: of the same section, or else of any."""
    prefix = path.removesuffix(key)
    known = ", ".join(sorted(section.model_fields))
    near = difflib.get_close_matches(key, section.model_fields, n=1)
    if near:
        return f"nearest known key: {prefix}{near[0]}; known here: {known}"

    places: dict[str, str] = {}
    for place in all_paths(Recipe):
        places.setdefault(place.rpartition(".")[2], place)

    near = difflib.get_close_matches(key, places, n=1, cutoff=0.75)
    elsewhere = f"nearest known key: {places[near[0]]}; " if near else ""
    return f"{elsewhere}known here: {known}"


def all_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key, outer ones first."""
    yield from (f"{prefix}{name}" for name in section.model_fields)
    for name, field in section.model_fields.items():
        nested = _nested_section(field.annotation)
        if nested is not None:
            yield from all_paths(nested, f"{prefix}{name}.")


def _allowed(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Say in words what a node of a JSON schema allows."""
    if "$ref" in node:
        keys = ", ".join(definitions[node["$ref"].rpartition("/")[2]]["properties"])
        return f"a section with keys among {keys}"

    if "anyOf" in node:
        return " or ".join(_allowed(part, definitions) for part in node["anyOf"])

    if "const" in node or "enum" in node:
        return " or ".join(show(value) for value in node.get("enum", [node.get("const")]))

    kind = node.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _bounds(node)

    if kind == "array":
        if "prefixItems" in node:
            return f"a list of {len(node['prefixItems'])}, each {_allowed(node['prefixItems'][0], definitions)}"

        return f"a list, each {_allowed(node['items'], definitions)}"

    names = {"string": "text", "boolean": "true or false", "null": "null", "object": "a mapping"}
    return names.get(str(kind), "a value") + (" that is not empty" if node.get("minLength") else "")


def _is_free_text(node: Mapping[str, Any]) -> bool:
    return node.get("type") == "string" and "const" not in node and "enum" not in node


def _bounds(node: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {node[name]}" for name, sign in signs.items() if name in node]
    return f" {' and '.join(bounds)}" if bounds else ""
