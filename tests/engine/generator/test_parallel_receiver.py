"""What the outcomes of single ranks mean for their replica: whole, as before, or of two versions. Over fake ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from generator_fakes import manifest

from engine.shared_folder import WeightTransferError
from engine.vllm_parallel import ParallelReceiver, RankDied, _Ranks
from engine.vllm_rank import METHOD, Answer

WRITTEN = Answer(value=({"w"}, 8))
BEFORE = Answer(error="bucket 3 was overwritten", kind="WeightTransferError")
HALF_WAY = Answer(error="bucket 4 was overwritten", kind="WeightTransferError", poisoned=True)
CRASHED = Answer(error="no such file", kind="OSError", poisoned=True)
PLAN: Any = SimpleNamespace(target=SimpleNamespace(num_ranks=2))


@dataclass
class FakeExecutor:
    """Answers `attach` and, once each, what it is told to."""

    answers: list[list[Answer]] = field(default_factory=list)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Answer]:
        assert method == METHOD
        return [Answer(), Answer()] if args[0] == "attach" else self.answers.pop(0)


def receiver(*answers: list[Answer]) -> tuple[ParallelReceiver, _Ranks]:
    ranks = _Ranks(2)
    ranks._executor = FakeExecutor(list(answers))
    made = ParallelReceiver(ranks, PLAN, Path("none"), 2)
    ranks.close()
    return made, ranks


@pytest.mark.parametrize(
    ("answers", "poisoned", "message"),
    [
        ([BEFORE, BEFORE], False, "tensor-parallel rank 0 of 2: bucket 3"),
        ([WRITTEN, BEFORE], True, "tensor-parallel rank 1 of 2: bucket 3"),
        ([BEFORE, WRITTEN], True, "tensor-parallel rank 0 of 2: bucket 3"),
        ([BEFORE, HALF_WAY], True, "tensor-parallel rank 0 of 2: bucket 3"),
        ([WRITTEN, HALF_WAY], True, "tensor-parallel rank 1 of 2: bucket 4"),
    ],
)
def test_whole_versions(answers: list[Answer], poisoned: bool, message: str) -> None:
    """A replica stays as it was only if no rank has written; a whole version makes it whole again."""
    made, _ = receiver(answers, [WRITTEN, WRITTEN])
    with pytest.raises(WeightTransferError, match=message):
        made.apply(manifest(1))

    assert made.poisoned == poisoned
    assert made.apply(manifest(2)) == ({"w"}, 16)
    assert not made.poisoned


def test_a_poisoned_replica_stays_so_until_a_version_is_applied() -> None:
    made, _ = receiver([WRITTEN, BEFORE], [BEFORE, BEFORE])
    for version in (1, 2):
        with pytest.raises(WeightTransferError):
            made.apply(manifest(version))

        assert made.poisoned


def test_an_error_of_another_kind_is_named_with_it() -> None:
    made, _ = receiver([WRITTEN, CRASHED])
    with pytest.raises(RuntimeError, match="tensor-parallel rank 1 of 2: OSError: no such file"):
        made.apply(manifest(1))

    assert made.poisoned


def test_a_dead_rank_poisons_for_good() -> None:
    made, ranks = receiver()
    ranks.death = "tensor-parallel rank 1 (process 7) died: killed by SIGKILL"
    with pytest.raises(RankDied, match=r"rank 1 \(process 7\) died"):
        made.apply(manifest(1))

    assert made.poisoned
    made.close()  # nobody is asked


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    plan: Any = SimpleNamespace(target=SimpleNamespace(num_ranks=4))
    with pytest.raises(ValueError, match="target has 4 ranks, this replica 2"):
        ParallelReceiver(_Ranks(2), plan, Path("none"), 2)
