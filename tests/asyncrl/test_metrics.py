"""Metric names: declared once, complete, and the same wherever a record goes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.escape import escape
from asyncrl.metrics import (
    GROUPS,
    METRICS,
    STEP_AXIS,
    EvalRecord,
    StepRecord,
    flatten,
    metrics_table,
    name_of,
    to_json,
)

MakeStepRecord = Callable[..., StepRecord]


def test_a_step_record_becomes_grouped_names_in_reported_units(step_record: MakeStepRecord) -> None:
    flat = flatten(step_record())
    assert flat[STEP_AXIS] == 3
    assert flat["train/loss"] == -0.25
    assert flat["train/skipped"] == 0
    assert flat["rollout/reward_mean"] == 0.5
    assert flat["schedule/staleness"] == 1
    assert flat["schedule/tokens_per_s"] == 5120
    assert flat["publish/total_ms"] == 7.0
    assert flat["publish/moved_mb"] == pytest.approx(0.5)
    assert flat["publish/memory_mb"] == pytest.approx(1.5)
    assert flat["memory/trainer_0_gb"] == pytest.approx(0.512)
    assert flat["memory/generator_0_gb"] == pytest.approx(1.5)


def test_what_is_not_known_is_left_out_and_zero_is_not(step_record: MakeStepRecord) -> None:
    flat = flatten(step_record(reward_mean=None, snapshot_ms=None, flip_ms=None, staleness=0, step_s=0.0))
    assert "rollout/reward_mean" not in flat
    assert "schedule/tokens_per_s" not in flat
    assert flat["schedule/staleness"] == 0
    assert flat["publish/total_ms"] == 2.0
    assert "publish/total_ms" not in flatten(step_record(snapshot_ms=None, prepare_ms=None, flip_ms=None))


def test_an_evaluation_stands_at_its_version_on_the_step_axis() -> None:
    record = EvalRecord(
        version=40,
        sampled_accuracy=0.9,
        greedy_accuracy=None,
        reward_mean=0.95,
        num_prompts=64,
        num_failures=2,
        eval_s=1.5,
    )
    assert flatten(record) == {
        STEP_AXIS: 40,
        "eval/version": 40,
        "eval/sampled_accuracy": 0.9,
        "eval/reward_mean": 0.95,
        "eval/num_prompts": 64,
        "eval/num_failures": 2,
        "eval/eval_s": 1.5,
    }


def test_numpy_numbers_become_plain_ones_and_anything_else_is_refused(step_record: MakeStepRecord) -> None:
    flat = flatten(step_record(loss=np.float32(0.5), staleness=np.int64(2)))
    assert type(flat["train/loss"]) is float
    assert type(flat["schedule/staleness"]) is int
    with pytest.raises(TypeError, match=r"train/lr must be a number, got '1e-3' \(str\)"):
        flatten(step_record(lr="1e-3"))


def test_every_field_of_a_record_has_a_metric_and_no_name_stands_for_two() -> None:
    for kind in (StepRecord, EvalRecord):
        assert all("metric" in item.metadata for item in dataclasses.fields(kind))
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(name.count("/") == 1 for name in names)
    assert GROUPS == ("train", "rollout", "schedule", "publish", "memory", "eval")


def test_records_are_frozen(step_record: MakeStepRecord) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        step_record().loss = 0.0  # type: ignore[misc]


def test_docs_list_every_metric() -> None:
    lines = list(metrics_table())
    assert len(lines) == len(METRICS) + 2
    assert "| `publish/flip_ms` | ms | slowest replica applying the version (copy and repack) |" in lines
    assert all(line.count("|") == 4 for line in lines)


def test_name_of_reads_a_flat_record_back() -> None:
    assert name_of(StepRecord, "reward_mean") == "rollout/reward_mean"
    assert name_of(StepRecord, "publish_ms") == "publish/total_ms"


def test_json_has_no_number_that_json_does_not_know() -> None:
    values = {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 0.1, "e": None}
    read = json.loads(to_json(values))
    assert read == {"a": "Infinity", "b": "-Infinity", "c": "NaN", "d": 0.1, "e": None}
    assert float(read["a"]) == math.inf


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold]text[/bold]", "plain [bold]text[/bold]"),
        ("a\x1b[31mb\r\n\tc\x00\x7f", r"a\x1b[31mb\r\n\tc\x00\x7f"),
        ("abc\u202edef\u2028\ud800", r"abc\u202edef\u2028\ud800"),
        ("größe 数 🙂 \\frac", "größe 数 🙂 \\frac"),
        ("\x9b2J", r"\x9b2J"),
    ],
)
def test_escape_spells_out_what_could_steer_a_terminal(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_escape_cuts_and_counts() -> None:
    assert escape("abcdef", limit=4) == "abcd... (+2 characters)"
    assert escape("abcd", limit=4) == "abcd"


@given(st.text(st.characters(categories=["C", "Z", "L", "N", "P", "S", "M"])))
def test_escaped_text_is_one_encodable_line(text: str) -> None:
    shown = escape(text)
    shown.encode("utf-8")
    assert len(f"{shown}x".splitlines()) == 1
    assert all(character >= " " and character != "\x7f" for character in shown)
