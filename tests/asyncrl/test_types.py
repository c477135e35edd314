"""Prompts, trajectories and groups: frozen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from asyncrl import types
from asyncrl.types import Group, Prompt, SampleFailure, Trajectory, VersionSpan
from asyncrl.wave import PublishReport, Wave
from engine.types import WeightVersion

PROMPT = Prompt(uid="p", index=0, text="ask", token_ids=(1,), answer="a")


def trajectory() -> Trajectory:
    return Trajectory(
        prompt_uid="p",
        sample_index=0,
        draw=0,
        attempt=0,
        token_ids=np.zeros(0, np.int32),
        loss_mask=np.ones(0, np.float32),
        generator_logprobs=np.zeros(0, np.float32),
        versions=(),
        text="",
        reward=0.0,
        correct=None,
        finish_reason="length",
    )


def everything() -> list[object]:
    publish = PublishReport(version=WeightVersion(0), prepare_ms=0.0, flip_ms=0.0, flips=())
    return [
        PROMPT,
        VersionSpan(start=0, stop=1, version=WeightVersion(0)),
        trajectory(),
        SampleFailure(prompt_uid="p", sample_index=0, attempt=0, reason="", traceback=""),
        Group(prompt=PROMPT, trajectories=()),
        publish,
        Wave(step=0, version=WeightVersion(0), prompts=(), results=(), started_s=0, ended_s=0, publish=publish),
    ]


def test_one_way_data() -> None:
    """No field of what is handed on can be set, and none can be added."""
    made = everything()
    declared = {each for each in vars(types).values() if dataclasses.is_dataclass(each)}
    assert declared <= {type(each) for each in made}, "a new type needs a place here"
    for each in made:
        assert dataclasses.is_dataclass(each)
        for item in dataclasses.fields(each):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(each, item.name, None)
        with pytest.raises((AttributeError, TypeError)):  # slots; the class of a frozen one says it either way
            each.note = "added"  # type: ignore[attr-defined]


def test_a_group_that_lost_everything_is_a_group() -> None:
    assert Group(prompt=PROMPT, trajectories=()).failures == ()
