"""Flips of a real replica, against Hugging Face; each test leaves it at a version of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from generator_replica import PROMPTS, Publication, Replica, bits, change, largest_difference, make_model, serving

from engine.types import WeightVersion
from engine.workers import Cluster, WorkerError

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_flip_changes_every_weight(replica: Replica) -> None:
    model = replica.publication.model
    before = await replica.generate()
    change(model, seed=1)
    assert largest_difference(model, before, 1.0) > 0.1
    report = await replica.publish()
    after = await replica.generate()
    assert largest_difference(model, after, 1.0) < 1e-5
    assert set(after.versions.tolist()) == {replica.version}
    assert report.num_bytes == replica.publication.plan.num_bytes
    assert report.copy_ms > 0
    assert report.repack_ms > 0


@pytest.mark.parametrize(
    "only", ["lm_head", "embed_tokens", "q_proj.bias", "v_proj.weight", "o_proj", "up_proj", "down_proj", "norm"]
)
async def test_a_flip_changes_each_kind_of_weight(replica: Replica, only: str) -> None:
    model = replica.publication.model
    before = await replica.generate()
    change(model, seed=2, only=only)
    assert largest_difference(model, before, 1.0) > 1e-3
    await replica.publish()
    assert largest_difference(model, await replica.generate(), 1.0) < 1e-5


async def test_a_version_that_is_not_live_is_refused(replica: Replica) -> None:
    wrong = replace(replica.request(), version=WeightVersion(replica.version + 1))
    message = f"VersionMismatch: generator-.* serves version {replica.version}, version {replica.version + 1} was"
    with pytest.raises(WorkerError, match=message):
        await replica.call("generate", wrong)


async def test_a_flip_is_refused_while_requests_run_and_prepare_is_not(replica: Replica) -> None:
    expected = await replica.generate(prompts=PROMPTS * 8, seeds=range(64))
    change(replica.publication.model, seed=3)
    manifest = replica.publication.write(replica.version + 1)
    running = await replica.start_generating(prompts=PROMPTS * 8, seeds=range(64))
    await replica.call("prepare", manifest)
    with pytest.raises(WorkerError, match=f"cannot flip to version {replica.version + 1}: .* are under way"):
        await replica.call("flip", manifest)
    assert not running.done()
    assert bits(await running) == bits(expected)

    await replica.call("flip", manifest)
    replica.version += 1
    assert largest_difference(replica.publication.model, await replica.generate(), 1.0) < 1e-5


async def test_no_stale_cache(replica: Replica) -> None:
    """A prompt whose blocks were cached under the old weights is computed anew under the new ones."""
    prompts = (PROMPTS[7] * 7)[:260], (PROMPTS[7] * 7)[:259]  # beginnings that fill two blocks of 128
    model = replica.publication.model
    for _ in range(2):
        before = await replica.generate(prompts=prompts, seeds=(1, 2))
        assert largest_difference(model, before, 1.0, prompts) < 1e-5
    change(model, seed=4, only="layers.0")
    await replica.publish()
    after = await replica.generate(prompts=prompts, seeds=(1, 2))
    assert largest_difference(model, after, 1.0, prompts) < 1e-5


async def test_a_bucket_that_changes_after_prepare_leaves_the_old_version_serving(replica: Replica) -> None:
    expected = await replica.generate()
    manifest = replica.publication.write(replica.version + 1)
    await replica.call("prepare", manifest)
    replica.publication.writer.write(replica.version + 99, 0, manifest.slot)
    with pytest.raises(WorkerError, match=f"TransportError: version {replica.version + 1}, bucket 0"):
        await replica.call("flip", manifest)

    with pytest.raises(WorkerError, match="TransportError"):
        await replica.call("prepare", manifest)

    assert bits(await replica.generate()) == bits(expected)
    await replica.publish()
    assert bits(await replica.generate()) == bits(expected)  # the same weights, one version on


async def test_a_tied_head_follows_its_embedding(cluster: Cluster, tmp_path: Path) -> None:
    publication = Publication.of(make_model(5, tied=True), tmp_path / "tied")
    async with serving(cluster, publication) as tied:
        with pytest.raises(WorkerError, match="has no version yet, version -1 was asked for: flip first"):
            await tied.generate()

        for seed in (6, 7):
            change(publication.model, seed=seed, only="embed_tokens" if seed == 7 else "")
            await tied.publish()
            assert largest_difference(publication.model, await tied.generate(), 1.0) < 1e-5

        pending = await tied.start_generating(prompts=PROMPTS * 8, seeds=range(64))
        await tied.call("stop")
        with pytest.raises(WorkerError, match=r"it was stopped, with \d+ of 64 samples of version 1 under way"):
            await pending
