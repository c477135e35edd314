"""The driver's side over fake ranks: who gets which share, what is merged, what a failure does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from engine.workers import WorkerDied, WorkerError
from trainers.megatron_group import MegatronTrainer
from trainers.types import LossSpec, MicroBatch, OptimizerSpec, RankStepResult, StepMetrics, TrainerSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.trainers.conftest import Batches

_METRICS = StepMetrics(
    loss=0.5, grad_norm=2.0, lr=1e-3, entropy=3.0, clip_fraction=0.1, ratio_max=1.5, generator_kl=0.01, num_tokens=21
)


class FakeRank:
    """Answers with what a test says and keeps what it was asked."""

    def __init__(self, rank: int, answers: dict[str, Callable[..., object]]) -> None:
        self.name = f"rank-{rank}"
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self._rank, self._answers = rank, answers

    async def call(self, method: str, *args: object, deadline_s: float | None, **kwargs: object) -> Any:  # noqa: ANN401
        assert (deadline_s is None) == (method == "watch"), f"{method} has deadline {deadline_s}"
        assert not kwargs, kwargs
        self.calls.append((method, args))
        await anyio.lowlevel.checkpoint()
        return self._answers[method](self._rank, *args)


def _trainer(answers: dict[str, Callable[..., object]], **sizes: int) -> tuple[MegatronTrainer, list[FakeRank]]:
    spec = TrainerSpec(model_dir="", optimizer=OptimizerSpec(lr=1e-3), loss=LossSpec(), seed=0, **sizes)
    ranks = [FakeRank(rank, answers) for rank in range(spec.num_ranks)]
    return MegatronTrainer(spec, ranks, master_addr="127.0.0.1"), ranks


def _result(rank: int, digests: dict[int, str], metrics: StepMetrics = _METRICS) -> RankStepResult:
    return RankStepResult(
        metrics=metrics, digests=digests, timings_ms={"total": 10.0 + rank}, peak_memory_bytes=100 + rank
    )


def test_a_step_hands_out_shares_and_merges_results(batches: Batches) -> None:
    """Ranks 0 and 1 are the tensor ranks of DP rank 0, ranks 2 and 3 those of DP rank 1."""
    trainer, ranks = _trainer(
        {"step": lambda rank, *_: _result(rank, {rank: f"digest {rank}", 10 + rank: "x"})}, dp=2, tp=2
    )
    shares = [[batches.micro(3)], [batches.micro(4), batches.micro(5)]]
    batch = batches.batch(7, shares)

    async def step() -> object:
        return await trainer.step(batch, epoch=1, slot=2)

    result: Any = anyio.run(step)
    for rank, share in zip(ranks, (0, 0, 1, 1), strict=True):
        assert rank.calls == [("step", (batch.micro_batches[share], 7, batch.num_loss_tokens, 1, 2))]
    assert (result.step, result.version, result.loss, result.skipped) == (7, 8, 0.5, False)
    assert set(result.digests) == {0, 1, 2, 3, 10, 11, 12, 13}
    assert result.timings_ms == {"total": 13.0}
    assert result.peak_memory_bytes == (100, 101, 102, 103)


def test_watch_raises_as_soon_as_one_rank_dies() -> None:
    def answer(rank: int) -> None:
        if rank == 1:
            raise WorkerDied("rank-1 died")

    trainer, _ = _trainer({"watch": answer}, dp=2)
    with pytest.raises(WorkerDied, match="rank-1 died"):
        anyio.run(trainer.watch)


@pytest.mark.parametrize(("error", "others"), [(WorkerError, "answer"), (WorkerDied, "wait")])
def test_a_failing_rank_fails_the_step(batches: Batches, error: type[Exception], others: str) -> None:
    """The others are given up where they wait for the dead one for ever."""

    class WaitingRank(FakeRank):
        async def call(self, method: str, *args: object, deadline_s: float | None, **kwargs: object) -> object:
            if self._rank == 0 and others == "wait":
                await anyio.sleep_forever()
            return await super().call(method, *args, deadline_s=deadline_s, **kwargs)

    def step(rank: int, *_: object) -> RankStepResult:
        if rank == 1:
            raise error("rank-1: the cause")
        return _result(rank, {})

    spec = TrainerSpec(model_dir="", optimizer=OptimizerSpec(lr=1e-3), loss=LossSpec(), seed=0, dp=2)
    trainer = MegatronTrainer(spec, [WaitingRank(rank, {"step": step}) for rank in range(2)])
    batch = batches.batch(0, [[batches.micro(3)], [batches.micro(4)]])

    async def run() -> None:
        with anyio.fail_after(10):
            await trainer.step(batch, epoch=0, slot=0)

    with pytest.raises(error, match="the cause"):
        anyio.run(run)


def test_an_empty_batch_never_reaches_the_ranks(batches: Batches) -> None:
    trainer, ranks = _trainer({})
    zero = np.zeros(1, np.float32)
    one = np.zeros(1, np.int64)
    masked = MicroBatch(
        token_ids=one, labels=one, lengths=(1,), loss_mask=zero, advantages=zero, generator_logprobs=zero
    )

    async def run() -> None:
        await trainer.step(batches.batch(3, [[masked]]), epoch=0, slot=0)

    with pytest.raises(AssertionError, match="step 3: an empty batch"):
        anyio.run(run)
    assert ranks[0].calls == []


def test_ranks_that_disagree_are_noticed(batches: Batches) -> None:
    other = StepMetrics(
        loss=0.6, grad_norm=2.0, lr=1e-3, entropy=3.0, clip_fraction=0.1, ratio_max=1.5, generator_kl=0.01, num_tokens=2
    )
    trainer, _ = _trainer({"step": lambda rank, *_: _result(rank, {}, other if rank else _METRICS)}, tp=2)

    async def run() -> None:
        await trainer.step(batches.batch(0, [[batches.micro(3)]]), epoch=0, slot=0)

    with pytest.raises(AssertionError):
        anyio.run(run)


def test_two_writers_of_a_bucket_are_noticed() -> None:
    trainer, _ = _trainer({"snapshot": lambda _rank, *_: {4: "digest"}}, tp=2)

    async def run() -> None:
        await trainer.snapshot(0, epoch=0, slot=0)  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match=r"buckets \[4\] have two writers"):
        anyio.run(run)


def test_start_meets_where_rank_0_listens() -> None:
    trainer, ranks = _trainer({"listen": lambda *_: 4711, "start": lambda rank, *_: f"info {rank}"}, dp=2)
    assert anyio.run(trainer.start) == ("info 0", "info 1")
    assert ranks[0].calls == [("listen", ("127.0.0.1",)), ("start", ("127.0.0.1", 4711))]
    assert ranks[1].calls == [("start", ("127.0.0.1", 4711))]


def test_logprobs_come_from_the_rank_that_reports(batches: Batches) -> None:
    """With a pipeline only the last stage has them."""

    def logprobs(rank: int, micro_batches: tuple[MicroBatch, ...]) -> object:
        return tuple(len(micro.labels) for micro in micro_batches) if rank >= 2 else None

    trainer, _ = _trainer({"logprobs": logprobs}, dp=2, pp=2)
    shares = ((batches.micro(3),), (batches.micro(4), batches.micro(5)))

    async def run() -> object:
        return await trainer.logprobs(shares)

    assert anyio.run(run) == ((3,), (4, 5))
