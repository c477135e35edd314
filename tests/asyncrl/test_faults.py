"""What must go wrong loudly: one message that names the cause, an exit status, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(600)
slow = pytest.mark.slow

StartTrain = Callable[..., Any]

LONG = "trainer.num_steps=100000"  # goes on until something happens to it
LOUD_S = 30.0  # a failure ends the run within this time
SHUT_DOWN_S = 10.0
TITLES = ("GeneratorWorker", "MegatronRank")
IS_GONE = "its process is gone (killed, out of memory, or crashed)"


def check_nothing_left(train: Any, *, within_s: float = 5.0) -> None:  # noqa: ANN401
    """No process, no shared memory (asked while it ran), no temporary file."""
    train.wait_until_gone(within_s=within_s)
    assert train.left_in_tmp() == []


def wait_for_step(train: Any, step: int) -> None:  # noqa: ANN401
    """Wait until a step has been reported."""
    path = train.place / "run" / "metrics.jsonl"
    train.wait_until(f"step {step}", lambda: path.exists() and f'"train/step": {step},' in path.read_text())


def partial_checkpoint(train: Any) -> Path | None:  # noqa: ANN401
    """The checkpoint that is being written."""
    return next(iter((train.place / "run" / "checkpoints").glob(".partial-*")), None)


def test_a_reward_function_that_raises_ends_the_run(start_train: StartTrain, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def broken(completion):\n    return completion.answr == 'x'\n")
    train = start_train(
        LONG,
        "reward.function=my_rewards:broken",
        "tracking.wandb.mode=offline",
        PYTHONPATH=str(tmp_path),
    )
    train.wait_for_output("publish: ")  # start-up is over
    started = time.monotonic()
    ended = train.wait()
    assert time.monotonic() - started < LOUD_S
    assert ended.exit_code == 1
    message = ended.message()
    assert message.startswith("error: step 0: 32 of 32 samples failed, more than schedule.max_failure_rate=0.2. ")
    assert "AttributeError: 'Completion' object has no attribute 'answr'" in message
    assert 'my_rewards.py", line 2, in broken' in ended.stderr, "the user's own line is in the traceback"
    assert (ended.summary["exit_reason"], ended.summary["steps"]) == ("failed", 0)
    check_nothing_left(train)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.num_stepz=3"], "trainer.num_stepz = 3: unknown key; nearest known key: trainer.num_steps;"),
        (["trainer.tp=3", "cluster.devices=4"], "trainer.tp = 3: must divide the model's num_attention_heads = 2"),
        (["schedule.max_staleness=-1"], "schedule.max_staleness = -1: must be a whole number >= 0"),
        (["reward.function=nowhere:nothing"], 'reward.function = "nowhere:nothing": no module nowhere'),
    ],
)
def test_a_wrong_recipe_starts_nothing(start_train: StartTrain, overrides: list[str], message: str) -> None:
    train = start_train(*overrides)
    ended = train.wait(within_s=60)
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert not ended.run.exists()
    check_nothing_left(train)


@pytest.mark.parametrize("title", ["GeneratorWorker", pytest.param("MegatronRank", marks=slow)])
def test_a_killed_worker_ends_the_run_and_is_named(start_train: StartTrain, title: str) -> None:
    train = start_train(LONG)
    wait_for_step(train, 1)
    shared_memory = train.shared_memory()
    (worker,) = train.workers(title)
    started = time.monotonic()
    worker.kill()
    ended = train.wait()
    assert time.monotonic() - started < LOUD_S
    name = {"GeneratorWorker": "generator_0", "MegatronRank": "trainer_0"}[title]
    assert ended.exit_code == 1
    assert ended.stderr.startswith(f"error: {name} (process {worker.pid}) died")
    assert ended.stderr.endswith(f": {IS_GONE}\n"), "one message, and no word of Ray's"
    assert ended.stderr.count("\n") == 1
    assert "raylet" not in ended.stdout
    assert ended.summary["error"] + "\n" == ended.stderr.removeprefix("error: ")
    assert not shared_memory.exists()
    check_nothing_left(train)


@slow
@pytest.mark.parametrize("layout", ["trainer.tp=2", "trainer.pp=2", "trainer.dp=2"])
def test_of_several_ranks_the_dead_one_is_named(start_train: StartTrain, layout: str) -> None:
    """Its peer fails too, and sooner: with an error about a connection."""
    train = start_train(LONG, layout, "cluster.devices=3")
    wait_for_step(train, 1)
    ranks = sorted(train.workers("MegatronRank"), key=psutil.Process.create_time)
    started = time.monotonic()
    ranks[1].kill()
    ended = train.wait()
    assert time.monotonic() - started < LOUD_S
    assert ended.exit_code == 1
    message = ended.message()
    assert re.search(
        rf" \(process {ranks[1].pid}\) died( while step was running or before)?: {re.escape(IS_GONE)}", message
    )
    assert message.startswith("error: trainer_")
    check_nothing_left(train)


@slow
def test_a_worker_that_hangs_ends_the_run_at_its_deadline(start_train: StartTrain) -> None:
    train = start_train(LONG, "cluster.call_deadline_s=5")
    wait_for_step(train, 1)
    train.worker("MegatronRank").send_signal(signal.SIGSTOP)
    started = time.monotonic()
    ended = train.wait()
    assert time.monotonic() - started < LOUD_S
    assert ended.exit_code == 1
    assert ended.message().startswith("error: trainer_0.step did not answer within 5 s")
    check_nothing_left(train)


@slow
def test_a_non_finite_loss_ends_the_run_and_names_the_step(start_train: StartTrain) -> None:
    ended = start_train(LONG, "trainer.optimizer.lr=1e30").wait()
    assert ended.exit_code == 1
    assert ended.message().startswith("error: trainer_0.step failed: NonFiniteLoss: step 1: the loss is nan; ")
    assert ended.summary["steps"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=slow)])
@pytest.mark.parametrize("moment", ["loop", pytest.param("start", marks=slow), pytest.param("checkpoint", marks=slow)])
def test_a_signal_shuts_everything_down(start_train: StartTrain, number: signal.Signals, moment: str) -> None:
    train = start_train("tracking.wandb.mode=offline", "trainer.num_steps=4" if moment == "checkpoint" else LONG)
    shared_memory = None
    if moment == "start":
        train.wait_until("a worker", lambda: train.workers("MegatronRank"))
    elif moment == "loop":
        wait_for_step(train, 1)
    else:
        train.wait_until("a checkpoint", lambda: partial_checkpoint(train))
        train.process.send_signal(signal.SIGSTOP)  # else it may be too quick for us
    shared_memory = train.shared_memory()
    check_shared_memory_is_private(shared_memory)
    send(train, number)
    started = time.monotonic()
    train.process.send_signal(signal.SIGCONT)
    ended = train.wait()
    assert time.monotonic() - started < SHUT_DOWN_S
    assert ended.exit_code == 130
    assert ended.stderr == f"error: ended by {number.name}\n"
    assert ended.summary["exit_reason"] == "interrupted"
    assert not shared_memory.exists()
    check_nothing_left(train)


def send(train: Any, number: signal.Signals) -> None:  # noqa: ANN401
    """As a terminal does: Ctrl-C reaches the whole foreground group, and a user in a hurry presses it again."""
    if number is signal.SIGINT:
        os.killpg(train.process.pid, number)
        os.killpg(train.process.pid, number)
    else:
        train.process.send_signal(number)


def check_shared_memory_is_private(folder: Path) -> None:
    """0700, and 0600 all that is in it."""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@slow
def test_a_killed_driver_takes_its_workers_along_and_is_swept_up_after(start_train: StartTrain) -> None:
    killed = start_train(LONG)
    wait_for_step(killed, 1)
    shared_memory = killed.shared_memory()
    workers = [worker for title in TITLES for worker in killed.workers(title)]
    assert len(workers) == 2
    killed.process.kill()
    assert psutil.wait_procs(workers, timeout=10)[1] == [], "workers outlive their driver"
    assert killed.wait().exit_code == -signal.SIGKILL
    assert shared_memory.exists()
    assert any(name.startswith("asyncrl-ray-") for name in killed.left_in_tmp())

    again = start_train("--resume", str(killed.place / "run"), place=killed.place, config=None, tiny=False)
    ended = again.wait()
    assert ended.exit_code == 2
    assert "holds no complete checkpoint" in ended.stderr

    next_run = start_train("trainer.num_steps=1", f"run.dir={killed.place / 'next'}", place=killed.place)
    assert next_run.wait().exit_code == 0
    assert not shared_memory.exists()
    assert not [name for name in next_run.left_in_tmp() if name.startswith("asyncrl-ray-")]


@slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_last_one_and_the_run_resumes(start_train: StartTrain) -> None:
    num_steps = 12
    train = start_train(f"trainer.num_steps={num_steps}", "checkpoint.every=2", "tracking.wandb.mode=offline")
    checkpoints = train.place / "run" / "checkpoints"
    complete = checkpoints / "step-000004"
    train.wait_until("the second checkpoint", complete.exists)
    train.wait_until("the third one being written", lambda: partial_checkpoint(train))
    train.process.kill()
    killed = train.wait()
    newest = max(checkpoints.glob("step-*"))
    last_step = int(newest.name.removeprefix("step-"))
    assert 4 <= last_step < num_steps
    assert (train.place / "run" / "model").resolve().is_relative_to(checkpoints)
    before = killed.fingerprints

    resumed = start_train("--resume", str(killed.run), place=train.place, config=None, tiny=False)
    ended = resumed.wait()
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert [line["train/step"] for line in ended.metrics_of("train/loss")] == list(range(num_steps))
    assert [line["step"] for line in ended.fingerprints] == list(range(num_steps))
    assert ended.fingerprints[:last_step] == before[:last_step]
    assert (ended.summary["steps"], ended.summary["resumed_from"]) == (num_steps, last_step)
    assert (ended.run / "model").resolve() == checkpoints / f"step-{num_steps:06d}" / "hf"
    assert json.loads((ended.run / "model" / "config.json").read_text())["model_type"] == "qwen2"
    resumed.wait_until_gone(within_s=90)  # two helpers of Ray's need a minute to notice that the first driver is dead
