"""The recipe as pydantic models: every field typed, documented and frozen. No torch, no Ray.

A component gets its own section (`recipe.trainer`, `recipe.generator`), never the whole recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from asyncrl.schema.base import Cpus, Dtype, Section
from asyncrl.schema.running import Checkpoint, Cluster, Evaluation, GeneratorSection, Tracking, Wandb
from asyncrl.schema.sources import CHAR_VOCAB_SIZE, Data, FreshModel, Model, Reward, Run, Source
from asyncrl.schema.training import Algorithm, LrSchedule, Optimizer, Publish, Schedule, TrainerSection

__all__ = [
    "CHAR_VOCAB_SIZE",
    "Algorithm",
    "Checkpoint",
    "Cluster",
    "Cpus",
    "Data",
    "Dtype",
    "Evaluation",
    "FreshModel",
    "GeneratorSection",
    "LrSchedule",
    "Model",
    "Optimizer",
    "Publish",
    "Recipe",
    "Reward",
    "Run",
    "Schedule",
    "Section",
    "Source",
    "Tracking",
    "TrainerSection",
    "Wandb",
    "json_schema",
    "main",
]


class Recipe(Section):
    """Everything that defines a run.

    Example: `configs/grpo_copy.yaml`, loaded by `asyncrl.config.load_recipe`.
    """

    seed: int = Field(default=0, ge=0, description="Seed of everything random in the run.")
    run: Run = Field(default=Run(), description="Where the run lives.")
    model: Model = Field(description="The model that is trained.")
    data: Data = Field(description="Training and held-out prompts.")
    reward: Reward = Field(description="How a response is scored.")
    algorithm: Algorithm = Field(default=Algorithm(), description="The loss.")
    schedule: Schedule = Field(default=Schedule(), description="How far generation runs ahead.")
    trainer: TrainerSection = Field(description="The Megatron-Core side.")
    generator: GeneratorSection = Field(description="The vLLM side.")
    publish: Publish = Field(default=Publish(), description="How weights travel.")
    eval: Evaluation = Field(default=Evaluation(), description="Held-out evaluation.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="What the run leaves on disk.")
    tracking: Tracking = Field(default=Tracking(), description="Where the metrics go.")
    cluster: Cluster = Field(default=Cluster(), description="Machines and patience.")

    @property
    def num_devices_needed(self) -> int:
        """Device slots that the workers of both sides take."""
        return self.trainer.world_size + self.generator.num_replicas * self.generator.tp

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a whole response."""
        return self.generator.max_model_len - self.generator.max_new_tokens

    @property
    def max_open_samples(self) -> int:
        """Samples that may be admitted and not yet trained: the bound of the window."""
        return (self.schedule.max_staleness + 1) * self.trainer.num_samples_per_step


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file, `defaults` and interpolations included, for editors."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "asyncrl recipe"
    schema["properties"] = {
        "defaults": {
            "description": "Recipes that are merged first, in order; paths relative to this file.",
            "items": {"type": "string"},
            "type": "array",
        },
        **schema["properties"],
    }
    return _for_editors(schema)


def _for_editors(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop `required` (a base file may give the key) and let every plain value be an interpolation, `${...}`."""
    node: dict[str, Any] = {}
    for key, value in schema.items():
        if isinstance(value, dict):
            node[key] = _for_editors(value)
        elif isinstance(value, list):
            node[key] = [_for_editors(item) if isinstance(item, dict) else item for item in value]
        else:
            node[key] = value

    node.pop("required", None)

    if node.get("type") in ("integer", "number", "boolean") or "const" in node or "enum" in node:
        about: dict[str, Any] = {key: node.pop(key) for key in ("title", "description", "default") if key in node}
        return {"anyOf": [node, {"type": "string", "pattern": r"\$\{.+\}"}], **about}

    return node


def main(argv: Sequence[str] | None = None) -> int:
    """Print the JSON schema of recipes: the `schema` command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="asyncrl schema",
        description="Print the JSON schema of recipes, with which editors complete and check them.",
    )
    parser.parse_args(argv)
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
    return 0
