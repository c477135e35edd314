"""The real command with several training ranks and several replicas, against the same run with one of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

StartTrain = Callable[..., Any]
Ended = Any


@pytest.fixture(scope="module")
def single(start_train: StartTrain) -> Ended:
    """One rank, one replica: what the others are compared with."""
    ended = start_train("cluster.devices=3").wait()
    assert ended.exit_code == 0
    return ended


@pytest.mark.parametrize("layout", ["trainer.tp=2", "trainer.pp=2", "trainer.dp=2"])
def test_parallel_ranks_train_as_one(start_train: StartTrain, single: Ended, layout: str) -> None:
    ended = start_train(layout, "cluster.devices=3").wait()
    assert (ended.exit_code, ended.stderr) == (0, "")
    steps, wanted = ended.metrics_of("train/loss"), single.metrics_of("train/loss")
    assert len(steps) == len(wanted) == 8
    # The rollouts of steps 0 and 1 are of version 0, whose weights are the same: so are the batches.
    for step in (0, 1):
        assert steps[step]["rollout/reward_mean"] == wanted[step]["rollout/reward_mean"]
        assert steps[step]["train/num_loss_tokens"] == wanted[step]["train/num_loss_tokens"]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert steps[0][name] == pytest.approx(wanted[0][name], rel=1e-5)
    assert ended.summary["peak_memory"].keys() == {"driver", "generator_0", "trainer_0", "trainer_1"}
    assert (ended.run / "model" / "model.safetensors").is_file()


def test_two_replicas_write_what_one_writes(start_train: StartTrain, single: Ended) -> None:
    """Tokens depend neither on which replica served a sample nor on what else was in its batch."""
    ended = start_train("generator.num_replicas=2", "cluster.devices=3").wait()
    assert (ended.exit_code, ended.stderr) == (0, "")
    assert ended.fingerprints == single.fingerprints
    assert ended.summary["peak_memory"].keys() == {"driver", "generator_0", "generator_1", "trainer_0"}


GENERATORS = {  # overrides, workers, and how near the first step is to one rank's
    # Two tensor-parallel ranks add in another order: the generator's logprobs, which the loss divides by, differ too.
    "tp2": (("generator.tp=2",), {"generator_0"}, 1e-4),
    "two replicas": (("generator.num_replicas=2",), {"generator_0", "generator_1"}, 1e-5),
}


@pytest.mark.parametrize("generators", GENERATORS)
def test_four_training_ranks_feed_divided_and_doubled_generators(
    start_train: StartTrain, single: Ended, generators: str
) -> None:
    overrides, names, rel = GENERATORS[generators]
    train = start_train("trainer.tp=2", "trainer.pp=2", *overrides, "cluster.devices=6")
    ended = train.wait(within_s=500)
    assert (ended.exit_code, ended.stderr) == (0, "")
    steps, wanted = ended.metrics_of("train/loss"), single.metrics_of("train/loss")
    assert len(steps) == len(wanted) == 8
    assert steps[0]["rollout/reward_mean"] == wanted[0]["rollout/reward_mean"]
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert steps[0][name] == pytest.approx(wanted[0][name], rel=rel)
    assert ended.summary["peak_memory"].keys() == {"driver", *(f"trainer_{rank}" for rank in range(4)), *names}
    train.wait_until_gone(within_s=10)


def test_a_tensor_parallel_rank_that_dies_ends_the_run_and_is_named(start_train: StartTrain) -> None:
    train = start_train("generator.tp=2", "trainer.num_steps=2000", "cluster.devices=3")
    train.wait_for_output("step ")
    (victim,) = [process for process in train.processes() if process.name() == "asyncrl-rank-1"]
    victim.kill()
    ended = train.wait(within_s=30)
    assert ended.exit_code == 1
    assert ended.message().startswith("error: generator_0.")
    assert f"tensor-parallel rank 1 (process {victim.pid}) died: killed by SIGKILL" in ended.message()
    train.wait_until_gone(within_s=10)
