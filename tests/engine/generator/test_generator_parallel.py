"""A real replica of two tensor-parallel ranks: its tokens, its flips, and what happens when a rank fails or dies.

One replica (untied output head, float32, prefix caching) for most tests. Ranks get a core each where there are two.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from generator_replica import (
    GREEDY,
    PROMPTS,
    SAMPLING,
    SEEDS,
    Publication,
    Replica,
    bits,
    change,
    largest_difference,
    make_model,
    one_by_one,
    serving,
)

from engine.workers import Cluster, WorkerDied, WorkerError, WorkerTimeout

pytestmark = pytest.mark.asyncio(loop_scope="module")

CORES = tuple(sorted(os.sched_getaffinity(0))[:2])
DEATH_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    model = make_model(0, tied=False, heads=4, kv_heads=2)
    publication = Publication.of(model, tmp_path_factory.mktemp("pair"), tp=2)
    async with serving(cluster, publication, tp=2, cpus=CORES, prefix_caching=True) as running:
        await running.publish()
        yield running


async def test_two_ranks_generate_what_one_generates(cluster: Cluster, pair: Replica, tmp_path: Path) -> None:
    publication = Publication.of(pair.publication.model, tmp_path / "single")
    async with serving(cluster, publication) as single:
        await single.publish()
        for sampling in (SAMPLING, GREEDY):
            alone, together = await single.generate(sampling=sampling), await pair.generate(sampling=sampling)
            assert alone.token_ids.tolist() == together.token_ids.tolist()
            np.testing.assert_allclose(alone.logprobs, together.logprobs, atol=1e-5)
            assert alone.finish_reasons == together.finish_reasons


async def test_same_seeds_same_bits_alone_and_in_company(pair: Replica) -> None:
    assert await one_by_one(pair) == bits(await pair.generate())


async def test_a_flip_changes_every_rank_and_no_cached_prefix_outlives_it(pair: Replica) -> None:
    prompts = (PROMPTS[7] * 7)[:260], (PROMPTS[7] * 7)[:259]  # beginnings that fill two blocks of 128
    model = pair.publication.model
    for seed in (1, 2):
        for _ in range(2):
            before = await pair.generate(prompts=prompts, seeds=(1, 2))
            assert largest_difference(model, before, 1.0, prompts) < 1e-5
        change(model, seed=seed)
        assert largest_difference(model, before, 1.0, prompts) > 0.1
        report = await pair.publish()
        assert report.num_bytes == pair.publication.plan.num_bytes
        after = await pair.generate(prompts=prompts, seeds=(1, 2))
        assert largest_difference(model, after, 1.0, prompts) < 1e-5
        assert set(after.versions.tolist()) == {pair.version}


async def test_a_byte_flipped_in_one_ranks_bucket_leaves_the_old_version_on_both(pair: Replica) -> None:
    expected = await pair.generate()
    change(pair.publication.model, seed=3)
    manifest = pair.publication.write(pair.version + 1)
    pair.publication.tamper(own_bucket(pair, 1), manifest.slot, header=False)
    message = rf"prepare failed: WeightTransferError: tensor-parallel rank 1 of 2: version {pair.version + 1}, bucket"
    with pytest.raises(WorkerError, match=message):
        await pair.call("prepare", manifest)

    assert bits(await pair.generate()) == bits(expected)
    await pair.publish()
    assert largest_difference(pair.publication.model, await pair.generate(), 1.0) < 1e-5


async def test_a_rank_that_could_not_apply_takes_the_replica_with_it_until_a_whole_version(pair: Replica) -> None:
    change(pair.publication.model, seed=4)
    manifest = pair.publication.write(pair.version + 1)
    await pair.call("prepare", manifest)
    pair.publication.tamper(own_bucket(pair, 1), manifest.slot, header=True)
    with pytest.raises(WorkerError, match="flip failed: WeightTransferError: tensor-parallel rank 1 of 2: version"):
        await pair.call("flip", manifest)

    with pytest.raises(
        WorkerError, match=r"cannot serve version .* failed half-way .* once a whole version is applied"
    ):
        await pair.generate()

    pair.version += 1
    change(pair.publication.model, seed=5)
    await pair.publish()
    assert largest_difference(pair.publication.model, await pair.generate(), 1.0) < 1e-5


async def test_live_parameters_are_the_layouts_on_every_rank(pair: Replica) -> None:
    assert tuple(map(dict, pair.info.params)) == tuple(map(dict, pair.publication.plan.target.params))


async def test_ranks_have_cores_of_their_own_and_speak_on_the_loopback(pair: Replica) -> None:
    ranks = [psutil.Process(pid) for pid in pair.info.worker_pids]
    for rank, process in enumerate(ranks):
        wanted = {CORES[rank]} if len(CORES) == 2 else set(CORES)
        assert [os.sched_getaffinity(thread.id) for thread in process.threads()] == [wanted] * process.num_threads()
        addresses = {connection.laddr.ip for connection in process.net_connections("inet") if connection.laddr}
        assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        os.kill(process.pid, signal.SIGINT)  # a Ctrl-C is the driver's
    resident = sum(process.memory_info().rss for process in (*ranks, psutil.Process(pair.info.pid)))
    assert (await pair.call("report")).peak_memory_bytes > 0.95 * resident
    assert (await pair.generate()).lengths.sum() > 0


async def test_no_shared_memory_can_stay_behind(pair: Replica) -> None:
    found = [mapped_segments(pid) for pid in (pair.info.pid, *pair.info.worker_pids)]
    assert all(found), "they share memory, but not so that this test sees it"
    assert not any(named for segments in found for named in segments.values()), found


async def test_a_tied_head_follows_and_a_rank_killed_while_it_applies_ends_the_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    publication = Publication.of(make_model(5, tied=True, heads=4, kv_heads=1), tmp_path / "tied2", tp=2)
    async with serving(cluster, publication, tp=2, cpus=CORES) as tied:
        for seed in (6, 7):
            change(publication.model, seed=seed, only="embed_tokens" if seed == 7 else "")
            await tied.publish()
            assert largest_difference(publication.model, await tied.generate(), 1.0) < 1e-5

        tied.dies = True
        manifest = publication.write(tied.version + 1)
        await tied.call("prepare", manifest)
        victim = tied.info.worker_pids[1]
        os.kill(victim, signal.SIGSTOP)  # the other one writes, this one never answers
        flip = tied.start("flip", manifest)
        with pytest.raises(WorkerTimeout):  # once it waits for the stopped one
            await until_blocked(tied, flip)
        os.kill(victim, signal.SIGKILL)
        await ends_with(tied, f"tensor-parallel rank 1 .process {victim}. died: killed by SIGKILL")
        with pytest.raises(WorkerError, match="flip failed: RankDied: tensor-parallel rank 1"):
            await flip

        with pytest.raises(WorkerError, match=r"serves nothing any more: its engine failed: .* rank 1"):
            await tied.generate()
    await gone(tied.info.worker_pids)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
async def test_a_rank_that_dies_ends_the_run_and_is_named(cluster: Cluster, tmp_path: Path, busy: bool) -> None:
    publication = Publication.of(make_model(8, tied=True, heads=4, kv_heads=2), tmp_path / f"dies{busy:d}", tp=2)
    async with serving(cluster, publication, tp=2, cpus=CORES) as replica:
        await replica.publish()
        replica.dies = True
        running = await replica.start_generating(prompts=PROMPTS * 8, seeds=range(64)) if busy else None
        victim = replica.info.worker_pids[0]
        os.kill(victim, signal.SIGKILL)
        await ends_with(replica, f"tensor-parallel rank 0 .process {victim}. died: killed by SIGKILL")
        if running is not None:
            with pytest.raises(WorkerError, match=r"rank 0 .* of version 0 under way"):
                await running
        await gone(replica.info.worker_pids)


@pytest.mark.slow
async def test_ranks_end_with_the_replicas_process(cluster: Cluster, tmp_path: Path) -> None:
    publication = Publication.of(make_model(8, tied=True, heads=4, kv_heads=2), tmp_path / "orphans", tp=2)
    async with serving(cluster, publication, tp=2, cpus=CORES) as replica:
        await replica.publish()
        replica.dies = True
        running = await replica.start_generating(prompts=PROMPTS * 8, seeds=range(64))
        os.kill(replica.info.pid, signal.SIGKILL)
        for call in (replica.pump, running):
            with pytest.raises(WorkerDied):
                await call
        await gone(replica.info.worker_pids)


@pytest.mark.slow
async def test_four_ranks_share_two_key_heads(cluster: Cluster, tmp_path: Path) -> None:
    publication = Publication.of(make_model(9, tied=False, heads=4, kv_heads=2), tmp_path / "four", tp=4)
    async with serving(cluster, publication, tp=4, cpus=CORES) as replica:
        for seed in (1, 2):
            change(publication.model, seed=seed)
            await replica.publish()
            result = await replica.generate(prompts=PROMPTS[:2], seeds=SEEDS[:2])
            assert largest_difference(publication.model, result, 1.0, PROMPTS[:2]) < 1e-5


def own_bucket(replica: Replica, rank: int) -> int:
    """A bucket that this rank reads and the other one does not."""
    plan = replica.publication.plan
    others = {
        bucket.id for other in range(plan.target.num_ranks) if other != rank for bucket in plan.buckets_of_target(other)
    }
    return next(bucket.id for bucket in plan.buckets_of_target(rank) if bucket.id not in others)


def mapped_segments(pid: int) -> dict[str, bool]:
    """vLLM's shared memory in a process, and whether it still has a name, under which it could stay behind."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/psm_" in line or "/dev/shm/vllm_" in line}
    return {path: not path.endswith("(deleted)") for path in paths}


async def until_blocked(replica: Replica, call: asyncio.Future[object]) -> None:
    """Return once the replica answers nothing any more."""
    while not call.done():
        await replica.worker.call("report", deadline_s=2)


async def ends_with(replica: Replica, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match=f"run failed: GeneratorError: .*: its engine failed: .*{message}"):
        await replica.pump
    assert time.monotonic() - started < DEATH_S


async def gone(pids: Sequence[int]) -> None:
    """Wait until these processes have ended."""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(processes, timeout=10)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)
