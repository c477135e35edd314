"""Rollout: who is asked for what, with which seeds; strict fake workers instead of replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollout import Rollout
from asyncrl.types import Prompt
from engine.seeds import Purpose, derive_seed
from engine.types import FlipReport, GenerateRequest, GenerateResult, Manifest, Sampling, WeightVersion
from engine.workers import WorkerDied

SAMPLING = Sampling(temperature=0.5, max_tokens=3, stop_token_ids=(2,))
MANIFEST = Manifest(
    epoch=0, version=WeightVersion(4), written_version=WeightVersion(4), plan_hash="p", slot=1, digests={0: "d"}
)
DEADLINES = {"generate": 11.0, "prepare": 12.0, "flip": 13.0, "stop": 14.0, "run": None}


@dataclass
class FakeReplica:
    """Writes one token a sample that says everything about it: the seed and the prompt's last token."""

    name: str
    prepare_ms: float = 1.0
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    stopped: anyio.Event = field(default_factory=anyio.Event)
    dies: bool = False

    async def call(self, method: str, *args: Any, deadline_s: float | None, **kwargs: Any) -> Any:  # noqa: ANN401
        assert not kwargs
        assert deadline_s == DEADLINES[method], (method, deadline_s)
        self.calls.append((method, *args))
        return await getattr(self, f"_{method}")(*args)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        assert isinstance(request, GenerateRequest)
        assert len(request.prompt_ids) == len(request.seeds) > 0
        count = len(request.seeds)
        return GenerateResult(
            token_ids=np.array([prompt[-1] for prompt in request.prompt_ids], np.int32),
            logprobs=np.array([-(seed % 1000) for seed in request.seeds], np.float32),
            versions=np.full(count, request.version, np.int32),
            lengths=np.ones(count, np.int32),
            finish_reasons=("length",) * count,
            busy_s=0.0,
        )

    async def _prepare(self, manifest: Manifest) -> float:
        assert manifest is MANIFEST
        return self.prepare_ms

    async def _flip(self, manifest: Manifest) -> FlipReport:
        return FlipReport(version=manifest.version, copy_ms=1.0, repack_ms=self.prepare_ms, num_bytes=8)

    async def _run(self) -> None:
        if self.dies:
            raise WorkerDied(f"{self.name} died")
        await self.stopped.wait()

    async def _stop(self) -> None:
        self.stopped.set()

    @property
    def requests(self) -> list[GenerateRequest]:
        return [call[1] for call in self.calls if call[0] == "generate"]


def replicas(count: int) -> list[FakeReplica]:
    return [FakeReplica(f"generator_{index}", prepare_ms=float(index + 1)) for index in range(count)]


def rollout(workers: list[FakeReplica], *, run_seed: int = 5, samples_per_prompt: int = 2) -> Rollout:
    return Rollout(
        replicas=workers,
        run_seed=run_seed,
        sampling=SAMPLING,
        samples_per_prompt=samples_per_prompt,
        deadline_s=11.0,
        prepare_deadline_s=12.0,
        flip_deadline_s=13.0,
        stop_deadline_s=14.0,
    )


def prompts(count: int, *, first: int = 0) -> tuple[Prompt, ...]:
    return tuple(
        Prompt(uid=f"p{index % 7}", index=index, text="", token_ids=(1, index), answer="")
        for index in range(first, first + count)
    )


def generate(workers: list[FakeReplica], asked: tuple[Prompt, ...], **options: Any) -> tuple[GenerateResult, ...]:  # noqa: ANN401
    async def main() -> tuple[GenerateResult, ...]:
        return await rollout(workers, **options).generate(step=3, version=WeightVersion(2), prompts=asked)

    return anyio.run(main)


def evaluate(workers: list[FakeReplica], asked: tuple[Prompt, ...], version: int = 2) -> tuple[GenerateResult, ...]:
    async def main() -> tuple[GenerateResult, ...]:
        greedy = Sampling(temperature=0.0, max_tokens=3, stop_token_ids=(2,))
        return await rollout(workers).evaluate(
            version=WeightVersion(version), prompts=asked, samples_per_prompt=3, sampling=greedy
        )

    return anyio.run(main)


def joined(results: tuple[GenerateResult, ...]) -> list[tuple[int, float]]:
    return [
        pair for result in results for pair in zip(result.token_ids.tolist(), result.logprobs.tolist(), strict=True)
    ]


@given(num_prompts=st.integers(1, 9), num_replicas=st.integers(1, 5), samples_per_prompt=st.integers(1, 3))
def test_contiguous_shares_of_even_size_one_call_each(
    num_prompts: int, num_replicas: int, samples_per_prompt: int
) -> None:
    workers = replicas(num_replicas)
    asked = prompts(num_prompts)
    results = generate(workers, asked, samples_per_prompt=samples_per_prompt)
    assert all(len(worker.calls) <= 1 for worker in workers)
    shares = [len(worker.requests[0].seeds) if worker.requests else 0 for worker in workers]
    assert all(share % samples_per_prompt == 0 for share in shares), "a group is not torn"
    assert max(shares) - min(shares) <= samples_per_prompt
    assert len(results) == sum(share > 0 for share in shares), "who has no share is not called"
    tokens = [token for token, _ in joined(results)]
    assert tokens == [prompt.token_ids[-1] for prompt in asked for _ in range(samples_per_prompt)]
    for worker in workers:
        for request in worker.requests:
            assert (request.version, request.sampling, request.priority) == (2, SAMPLING, 0)


@given(num_prompts=st.integers(1, 9), num_replicas=st.integers(2, 5), first=st.integers(0, 50))
def test_a_samples_tokens_depend_on_no_replica(num_prompts: int, num_replicas: int, first: int) -> None:
    """The fake answers with the seed it got: same answers, whatever the number of replicas and the rest of the wave."""
    asked = prompts(num_prompts, first=first)
    alone = joined(generate(replicas(1), asked))
    assert joined(generate(replicas(num_replicas), asked)) == alone
    assert joined(generate(replicas(1), asked[:1])) == alone[:2]


def test_a_seed_of_its_own_for_every_sample_from_the_samples_name_alone() -> None:
    (worker,) = workers = replicas(1)
    asked = prompts(14)  # every uid twice: the second epoch
    generate(workers, asked, samples_per_prompt=3)
    seeds = worker.requests[0].seeds
    assert len(set(seeds)) == 14 * 3
    assert seeds[4] == derive_seed(5, Purpose.SAMPLE, "p1", 1, 1, 0)
    generate(workers, asked, samples_per_prompt=3, run_seed=6)
    assert not set(worker.requests[1].seeds) & set(seeds)


def test_evaluation_asks_behind_training_with_seeds_of_its_own_the_same_for_every_version() -> None:
    workers = replicas(2)
    asked = prompts(3)
    results = evaluate(workers, asked, version=2)
    assert [token for token, _ in joined(results)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for worker in workers:
        (request,) = worker.requests
        assert (request.version, request.priority, request.sampling.temperature) == (2, 1, 0.0)
    seeds = [seed for worker in workers for seed in worker.requests[0].seeds]
    assert len(set(seeds)) == 9
    assert joined(evaluate(replicas(1), asked, version=40)) == joined(results)
    trained = replicas(1)
    generate(trained, asked, samples_per_prompt=3)
    assert not set(trained[0].requests[0].seeds) & set(seeds)


def test_nothing_asked_is_nothing_answered() -> None:
    workers = replicas(2)
    assert generate(workers, ()) == ()
    assert [worker.calls for worker in workers] == [[], []]


def test_a_version_goes_to_every_replica_and_the_slowest_counts() -> None:
    async def main() -> None:
        workers = replicas(3)
        versions = rollout(workers)
        assert await versions.prepare(MANIFEST) == 3.0
        flips = await versions.flip(MANIFEST)
        assert [flip.repack_ms for flip in flips] == [1.0, 2.0, 3.0], "in the replicas' order"
        assert [worker.calls for worker in workers] == [[("prepare", MANIFEST), ("flip", MANIFEST)]] * 3

    anyio.run(main)


def test_watch_returns_after_stop() -> None:
    async def main() -> None:
        watched = rollout(replicas(2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watched.watch)
            await watched.stop()

    anyio.run(main)


def test_loud_failure_of_a_dead_replica_while_the_others_run() -> None:
    async def main() -> None:
        workers = replicas(3)
        workers[1].dies = True
        with anyio.fail_after(10):
            await rollout(workers).watch()

    with pytest.raises(WorkerDied, match="generator_1 died"):
        anyio.run(main)


def test_loud_failure_of_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    async def died(_: GenerateRequest) -> GenerateResult:
        raise WorkerDied("generator_1 died")

    workers = replicas(2)
    monkeypatch.setattr(workers[1], "_generate", died)
    with pytest.raises(WorkerDied, match="generator_1 died"):
        generate(workers, prompts(4))
