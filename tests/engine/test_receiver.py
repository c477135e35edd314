"""Invariant *whole versions*: whatever is wrong with a version, no mixed model is ever called one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.plan import Plan
from engine.receiver import Receiver
from engine.segments import SegmentMap, WeightTransferError
from engine.types import Manifest, WeightVersion

World = Any  # conftest's
MakeWorld = Callable[..., World]


def flip_bit(world: World, bucket_id: int, slot: int) -> None:
    """Flip one bit of a payload behind the writer's back."""
    rank = world.plan.buckets[bucket_id].source_rank
    segment = SegmentMap.of(world.plan, rank, world.num_slots)
    with (world.folder / segment.file_name).open("r+b") as file:
        file.seek(segment.payload(bucket_id, slot).stop - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def truncate(world: World) -> None:
    """Cut the last source rank's file short."""
    os.truncate(sorted(world.folder.iterdir())[-1], 64)


def without_bucket(manifest: Manifest, bucket_id: int) -> Manifest:
    """A manifest that forgot a bucket."""
    digests = {bucket: digest for bucket, digest in manifest.digests.items() if bucket != bucket_id}
    return dataclasses.replace(manifest, digests=digests)


def with_digest(manifest: Manifest, bucket_id: int, digest: str) -> Manifest:
    """A manifest with another digest."""
    return dataclasses.replace(manifest, digests={**manifest.digests, bucket_id: digest})


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A replica that serves version 1 (weights of seed 1) from slot 0, with version 2 (seed 2) written to slot 1."""
    world = make_world(tp=2, dp=2, bucket_bytes=1000)
    world.train(seed=1)
    world.flip(world.write(1, slot=0))
    world.train(seed=2)
    return world


def overwrite(world: World, **changes: int) -> None:
    """The training ranks write another version over slot 1."""
    world.write(**({"version": 2, "slot": 1} | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda world: flip_bit(world, 5, 1), r"version 2, bucket 5 of source rank \d, slot 1: the payload hashes"),
        (truncate, "source-00003.buckets was truncated to 64 bytes, the plan says"),
        (lambda world: overwrite(world, version=3), r"bucket 0 of source rank 0, slot 1: version is 3, want 2"),
        (lambda world: overwrite(world, epoch=1), "epoch is 1, want 0"),
    ],
)
def test_whole_versions(world: World, damage: Callable[[World], None], message: str) -> None:
    """Bytes that are not the manifest's are found by `prepare` and named; what was served stays, bit for bit."""
    manifest = world.write(2, slot=1)
    damage(world)
    assert_refused(world, manifest, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda manifest: without_bucket(manifest, 3), r"manifest of version 2: buckets missing \[3\], unknown \[\]"),
        (lambda manifest: with_digest(manifest, 999, "00" * 16), r"buckets missing \[\], unknown \[999\]"),
        (lambda manifest: with_digest(manifest, 4, "ab" * 16), "bucket 4 of source .* digest is .*, want (ab){16}"),
        (lambda manifest: dataclasses.replace(manifest, plan_hash="0" * 32), "plan 0{32}, this side has"),
        (lambda manifest: dataclasses.replace(manifest, slot=2), r"slot 2 is not in \[0, 2\)"),
        (lambda manifest: dataclasses.replace(manifest, slot=0), "version is 1, want 2; digest is"),
    ],
)
def test_whole_versions_by_their_manifest(
    world: World,
    damage: Callable[[Manifest], Manifest],
    message: str,
) -> None:
    """A manifest that is not the written bytes' is refused in the same way."""
    assert_refused(world, damage(world.write(2, slot=1)), message)


def assert_refused(world: World, manifest: Manifest, message: str) -> None:
    """`prepare` raises with this message, and the replica goes on with version 1."""
    (receiver,) = world.receivers
    with pytest.raises(WeightTransferError, match=message):
        receiver.prepare(manifest)
    assert (receiver.version, receiver.poisoned) == (1, False)
    assert world.target_holds(seed=1)


def test_a_segment_that_is_not_there_is_named(make_world: MakeWorld) -> None:
    world = make_world(dp=2)
    manifest = world.write(1, slot=0)
    for writer in world.writers:
        writer.close()
    with pytest.raises(WeightTransferError, match=r"source-00000.buckets of source rank 0: No such file"):
        world.receivers[0].prepare(manifest)
    assert world.receivers[0].version is None


def test_a_slot_that_is_written_again_before_apply_changes_nothing(world: World) -> None:
    manifest = world.write(2, slot=1)
    (receiver,) = world.receivers
    receiver.prepare(manifest)
    world.write(3, slot=1)
    with pytest.raises(WeightTransferError, match="version is 3, want 2"):
        receiver.apply(manifest)
    assert (receiver.version, receiver.poisoned) == (1, False)
    assert world.target_holds(seed=1)


def test_a_slot_that_is_written_again_during_apply_poisons(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last header check sees it; until a whole version has been applied there is no version."""
    manifest = world.write(2, slot=1)
    (receiver,) = world.receivers
    receiver.prepare(manifest)
    copy = torch._foreach_copy_
    calls = []

    def copy_while_the_writer_goes_on(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(1)
        if len(calls) == 3:
            monkeypatch.setattr(torch, "_foreach_copy_", copy)
            world.train(seed=3)
            world.write(3, slot=1)
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_while_the_writer_goes_on)
    with pytest.raises(WeightTransferError, match="version is 3, want 2"):
        receiver.apply(manifest)
    assert (receiver.version, receiver.poisoned) == (None, True)
    assert "version 2 was overwritten while it was applied" in receiver.poison
    assert not world.target_holds(seed=2)

    world.flip(world.write(4, slot=0))
    assert (receiver.version, receiver.poisoned, receiver.poison) == (4, False, None)
    assert world.target_holds(seed=3)


def test_a_half_applied_version_poisons_until_a_whole_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = world.write(2, slot=1)
    (receiver,) = world.receivers
    receiver.prepare(manifest)
    copy = torch._foreach_copy_
    calls = []

    def fail_half_way(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("out of something")

        copy(targets, sources)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", fail_half_way)
        with pytest.raises(RuntimeError, match="out of something"):
            receiver.apply(manifest)
    assert (receiver.version, receiver.poisoned) == (None, True)
    assert receiver.poison == "the apply of version 2 did not end"
    assert not world.target_holds(seed=1)
    assert not world.target_holds(seed=2)

    receiver.apply(manifest)
    assert (receiver.version, receiver.poisoned) == (2, False)
    assert world.target_holds(seed=2)


def test_apply_needs_the_prepare_of_the_same_manifest(world: World) -> None:
    manifest = world.write(2, slot=1)
    (receiver,) = world.receivers
    with pytest.raises(AssertionError, match="apply of version 2 without its prepare"):
        receiver.apply(manifest)
    receiver.prepare(manifest)
    other = dataclasses.replace(manifest, version=WeightVersion(3))
    with pytest.raises(AssertionError, match="apply of version 3 without its prepare"):
        receiver.apply(other)
    with pytest.raises(WeightTransferError):
        receiver.prepare(without_bucket(manifest, 0))
    with pytest.raises(AssertionError, match="apply of version 2 without its prepare"):
        receiver.apply(manifest)
    assert world.target_holds(seed=1)


def test_a_later_version_may_be_prepared_before_the_flip(make_world: MakeWorld) -> None:
    """What is proven stays proven; an applied version takes the older ones with it."""
    world = make_world(num_slots=3)
    manifests = []
    for version in (1, 2, 3):
        world.train(seed=version)
        manifests.append(world.write(version, slot=version % 3))
        world.receivers[0].prepare(manifests[-1])
    (receiver,) = world.receivers
    receiver.apply(manifests[1])
    assert receiver.version == 2
    assert world.target_holds(seed=2)
    with pytest.raises(AssertionError, match=r"apply of version 1 without its prepare; prepared are \[3\]"):
        receiver.apply(manifests[0])
    receiver.apply(manifests[2])
    assert world.target_holds(seed=3)


def test_apply_says_what_it_wrote(world: World) -> None:
    manifest = world.write(2, slot=1)
    (receiver,) = world.receivers
    receiver.prepare(manifest)
    touched, num_bytes = receiver.apply(manifest)
    assert touched == set(world.targets[0])
    assert num_bytes == world.plan.target_bytes(0)


def test_a_version_without_new_bits_moves_no_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = world.write(2, slot=1)
    world.flip(manifest)
    (receiver,) = world.receivers
    alias = dataclasses.replace(manifest, version=WeightVersion(3))
    monkeypatch.setattr(torch, "_foreach_copy_", None)
    receiver.prepare(alias)
    assert receiver.apply(alias) == (set(), 0)
    assert receiver.version == 3


def test_an_alias_is_copied_where_its_bytes_are_not_live(world: World) -> None:
    """A replica that skipped the version that wrote the bytes gets them with the alias."""
    alias = dataclasses.replace(world.write(2, slot=1), version=WeightVersion(3))
    world.flip(alias)
    assert world.receivers[0].version == 3
    assert world.target_holds(seed=2)


def test_padding_is_filled_once_and_never_copied(make_world: MakeWorld) -> None:
    world = make_world(target_tp=2)
    for rank, params in enumerate(world.targets):
        for pad in world.plan.target.pads[rank]:
            assert (params[pad.param][pad.box.slices] == 0).all()
    assert torch.isnan(world.targets[0]["model.norm.weight"]).all()
    assert world.plan.target.pads[1]


def test_every_live_parameter_must_be_covered(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    extra = world.targets[0] | {"model.rotary": torch.zeros(3), "visual.weight": torch.zeros(3)}
    with pytest.raises(
        WeightTransferError, match=r"model.rotary is not in the layout; visual.weight is not in the layout"
    ):
        Receiver(world.plan, 0, extra, tmp_path, 2)

    plan = world.plan
    lacking = Plan(plan.source, plan.target, plan.bucket_bytes, plan.buckets[:-1])
    with pytest.raises(
        WeightTransferError,
        match=r"does not cover the parameters of target rank 0: model.embed_tokens.weight 432 of 1024 elements; model",
    ):
        Receiver(lacking, 0, world.targets[0], tmp_path, 2)


def test_live_parameters_keep_their_storage(world: World) -> None:
    before = [tensor.data_ptr() for tensor in world.targets[0].values()]
    world.flip(world.write(2, slot=1))
    assert [tensor.data_ptr() for tensor in world.targets[0].values()] == before


def test_a_late_replica_gets_the_newest_whole_version(world: World) -> None:
    """A second replica shares plan and buckets with the first."""
    manifest = world.write(2, slot=1)
    world.flip(manifest)
    params = {name: torch.zeros_like(tensor) for name, tensor in world.targets[0].items()}
    late = Receiver(world.plan, 0, params, world.folder, world.num_slots)
    late.prepare(manifest)
    late.apply(manifest)
    assert all(torch.equal(params[name], tensor) for name, tensor in world.targets[0].items())
    late.close()
    late.close()
