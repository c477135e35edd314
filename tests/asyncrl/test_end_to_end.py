"""The real command, from a recipe to a model: it learns, it repeats itself bit for bit, it keeps to itself."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.summary import Summary

pytestmark = pytest.mark.timeout(600)

StartTrain = Callable[..., Any]


def test_the_copy_task_is_learned(start_train: StartTrain) -> None:
    """The learning run of `make test`: the README's command, as it is, but for the numbers of a quieter console."""
    ended = start_train(tiny=False).wait(within_s=500)
    assert (ended.exit_code, ended.stderr) == (0, "")
    summary = ended.summary
    assert summary.keys() >= {field.name for field in dataclasses.fields(Summary)}
    assert summary["exit_reason"] == "finished"
    assert summary["steps"] == len(ended.metrics_of("train/loss"))
    assert summary["staleness_max"] == 1
    assert summary["eval_sampled"] >= 0.95
    assert summary["reward_end"] > 0.9 > 0.1 > summary["reward_start"]
    last = [line["eval/sampled_accuracy"] for line in ended.metrics_of("eval/sampled_accuracy")][-2:]
    assert min(last) >= 0.9, f"it did not end stable: {last}"
    assert (ended.run / "model" / "model.safetensors").is_file()
    assert ended.stdout.splitlines()[-1].startswith("finished: ")


@pytest.fixture(scope="module")
def reference(start_train: StartTrain) -> Any:  # noqa: ANN401
    """A short run with evaluations; others are compared with it. Several at once: the order of events differs."""
    return start_train("eval.every=2", "eval.num_prompts=16")


def test_same_seeds_same_bits(start_train: StartTrain, reference: Any) -> None:  # noqa: ANN401
    """With max_staleness 1, and with evaluation on and off: batches, losses and weights, bit for bit."""
    running = start_train("eval.every=0"), start_train("seed=1", "trainer.num_steps=2")
    ended, other, another_seed = (train.wait() for train in (reference, *running))
    assert (ended.exit_code, other.exit_code, another_seed.exit_code) == (0, 0, 0)
    assert ended.summary["staleness_max"] == other.summary["staleness_max"] == 1
    assert len(ended.metrics_of("eval/sampled_accuracy")) == 5
    assert not other.metrics_of("eval/sampled_accuracy")
    assert [line["step"] for line in ended.fingerprints] == list(range(8))
    assert len({line["weights"] for line in ended.fingerprints}) == 8, "steps that change nothing prove nothing"
    assert ended.fingerprints == other.fingerprints
    first, same_step = ended.fingerprints[0], another_seed.fingerprints[0]
    assert all(first[name] != same_step[name] for name in ("batch", "loss", "grad_norm", "weights"))


def test_what_a_run_writes_is_private(reference: Any) -> None:  # noqa: ANN401
    run: Path = reference.wait().run
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    files = [path for path in run.iterdir() if path.is_file() and not path.is_symlink()]
    assert {"metrics.jsonl", "recipe.yaml", "summary.json", "fingerprints.jsonl", "samples.jsonl"} <= {
        path.name for path in files
    }
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files} == {path.name: 0o600 for path in files}


def test_a_run_leaves_only_its_folder(reference: Any) -> None:  # noqa: ANN401
    """No process, no temporary file; at home no more than a cache."""
    reference.wait()
    reference.wait_until_gone(within_s=10)
    assert reference.left_in_tmp() == []
    assert {path.name for path in (reference.place / "home").iterdir()} <= {".cache"}
