"""A replica's versions, over a strict fake engine: which is served, what a failed flip leaves. On asyncio and trio."""

from __future__ import annotations

import anyio
import pytest
from generator_fakes import FakeEngine, FakeReceiver, manifest, publish, pumping, request, started, under_way

from engine.generate_call import GeneratorError, VersionMismatch

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("this_process_stays_as_it_was"), pytest.mark.timeout(60)]


async def test_honest_version_labels() -> None:
    worker = await started(receiver=FakeReceiver(), loaded_version=None)
    async with pumping(worker):
        for version in (0, 1, 2):
            await publish(worker, version)
            result = await worker.generate(request(3, 3, version=version))
            assert result.versions.tolist() == [version] * 8


async def test_another_version_is_refused_and_both_are_named() -> None:
    with pytest.raises(VersionMismatch, match="serves version 4, version 5 was asked for"):
        await (await started(loaded_version=4)).generate(request(1, version=5))

    with pytest.raises(VersionMismatch, match="has no version yet, version 0 was asked for"):
        await (await started(loaded_version=None)).generate(request(1))


async def test_a_flip_is_refused_while_requests_run() -> None:
    engine = FakeEngine()
    worker = await started(engine, FakeReceiver())
    await worker.prepare(manifest(1))
    async with under_way(worker, request(3, 1)) as results:
        with pytest.raises(GeneratorError, match="cannot flip to version 1: 2 samples of version 0 are under way"):
            await worker.flip(manifest(1))

        assert engine.log == []
        async with pumping(worker):
            while not results:
                await anyio.wait_all_tasks_blocked()
            await worker.flip(manifest(1))
    assert results[0].versions.tolist() == [0] * 6
    assert engine.log == ["repack ['w']", "reset", "close"]


@pytest.mark.parametrize("fail", ["half-way", "repack"])
async def test_whole_versions(fail: str) -> None:
    """A flip that failed after its first byte serves nothing until a whole version is applied."""
    engine, receiver = FakeEngine(fail_repack=fail == "repack"), FakeReceiver(fail=fail)
    worker = await started(engine, receiver)
    with pytest.raises(RuntimeError, match=r"overwritten|no memory"):
        await publish(worker, 1)

    for version in (0, 1):
        with pytest.raises(GeneratorError, match=f"cannot serve version {version}: the flip to version 1 failed"):
            await worker.generate(request(1, version=version))

    receiver.fail, engine.fail_repack = "", False
    engine.log.clear()
    await publish(worker, 2)
    assert engine.log == ["repack all", "reset"]  # all of it: nobody knows what was packed from what
    async with pumping(worker):
        assert (await worker.generate(request(1, version=2))).versions.tolist() == [2, 2]


@pytest.mark.parametrize("fail", ["prepare", "before"])
async def test_a_failure_before_the_first_byte_leaves_the_old_version_serving(fail: str) -> None:
    worker = await started(receiver=FakeReceiver(fail=fail))
    with pytest.raises(RuntimeError, match="bucket 3"):
        await publish(worker, 1)

    async with pumping(worker):
        assert (await worker.generate(request(1, version=0))).versions.tolist() == [0, 0]
