"""Training ranks to generator ranks through shared memory, bitwise, in every layout; and snapshots that are untorn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.segments import BucketState, SegmentReader, WeightTransferError
from engine.snapshot import SnapshotWriter

World = Any  # conftest's
BuildWorld = Callable[..., World]


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a model and of both sides; buckets from a few elements to everything."""
    groups = draw(st.sampled_from([1, 2, 4]))
    target_tp = draw(st.sampled_from([1, 2]))
    config = {
        "model_type": "qwen2",
        "hidden_size": 4 * draw(st.integers(1, 4)),
        "head_dim": 2 * draw(st.integers(1, 2)),
        "num_attention_heads": 4,
        "num_key_value_heads": groups,
        "intermediate_size": 2 * draw(st.integers(1, 6)),
        "num_hidden_layers": 2,
        "vocab_size": draw(st.integers(1, 140)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    sizes = {name: draw(st.sampled_from([1, 2])) for name in ("tp", "pp", "dp")}
    bucket_bytes = draw(st.sampled_from([12, 100, 1000, 1 << 20]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    return {"config": config, **sizes, "target_tp": target_tp, "bucket_bytes": bucket_bytes, "target_dtype": dtype}


@settings(max_examples=40)
@given(sizes=worlds(), epoch=st.integers(0, 3))
def test_every_layout_arrives_bitwise(build_world: BuildWorld, sizes: dict[str, Any], epoch: int) -> None:
    """Two versions through two slots, against gather-then-slice; padding is 0."""
    world = build_world(**sizes)
    try:
        for version, slot in ((4, 1), (5, 0)):
            world.train(seed=version)
            world.flip(world.write(version, slot=slot, epoch=epoch))
            assert world.target_holds(seed=version)
    finally:
        world.close()


def test_a_bucket_that_is_larger_than_a_chunk_arrives_bitwise(make_world: BuildWorld, make_config: BuildWorld) -> None:
    """Copied and hashed in several chunks, some of which cut a row."""
    config = make_config(hidden_size=400, num_attention_heads=4, vocab_size=3000, num_hidden_layers=1)
    world = make_world(config=config, bucket_bytes=64 << 20)
    assert max(bucket.num_bytes for bucket in world.plan.buckets) > 4 << 20
    manifest = world.write(0, slot=0)
    world.flip(manifest)
    assert world.target_holds(seed=0)


def payloads(world: World, slot: int) -> dict[int, bytes]:
    """Bucket id -> bytes in shared memory, read as another process would."""
    found: dict[int, bytes] = {}
    for rank in range(world.plan.source.num_ranks):
        reader = SegmentReader(world.plan, rank, world.folder, world.num_slots)
        for bucket in world.plan.buckets_of_source(rank):
            found[bucket.id] = reader.memory[reader.payload(bucket.id, slot)]
        reader.close()
    return found


def test_untorn_snapshot(make_world: BuildWorld) -> None:
    """Weights that change right after `write` returned change neither the published digests nor the bytes."""
    world = make_world(tp=2, pp=2, dp=1, bucket_bytes=500)
    manifest = world.write(1, slot=0)
    before = payloads(world, 0)
    for params in world.sources:
        for tensor in params.values():
            tensor.add_(1.0)
    assert payloads(world, 0) == before
    assert manifest.digests == {bucket: xxhash.xxh3_128_hexdigest(content) for bucket, content in before.items()}

    world.flip(manifest)
    assert world.target_holds(seed=0)
    changed = world.write(2, slot=1)
    assert all(changed.digests[bucket] != manifest.digests[bucket] for bucket in manifest.digests)


def test_a_bucket_is_marked_while_it_is_written(make_world: BuildWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """WRITING stands in the header before the first byte, SEALED only after the last."""
    world = make_world(bucket_bytes=500)
    world.write(1, slot=0)
    reader = SegmentReader(world.plan, 0, world.folder, world.num_slots)
    copy, seen = torch._foreach_copy_, []

    def look(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        headers = [reader.header(bucket.id, 0) for bucket in world.plan.buckets]
        seen.append([(header.version, header.state) for header in headers])
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", look)
    world.write(2, slot=0)
    old, writing, sealed = (1, BucketState.SEALED), (2, BucketState.WRITING), (2, BucketState.SEALED)
    count = world.plan.num_buckets
    assert seen == [[sealed] * done + [writing] + [old] * (count - done - 1) for done in range(count)]
    reader.close()


def test_equal_weights_have_equal_digests(make_world: BuildWorld) -> None:
    world = make_world(dp=2, bucket_bytes=500)
    first, second = world.write(1, slot=0), world.write(2, slot=1)
    assert first.digests == second.digests
    assert set(first.digests) == set(range(world.plan.num_buckets))


def test_views_follow_a_parameter_to_another_storage(make_world: BuildWorld) -> None:
    """Megatron's DDP moves parameters into one buffer: `param.data` is another tensor then."""
    world = make_world(tp=2)
    world.write(0, slot=0)
    for params, wanted in zip(world.sources, world.source_reference(seed=7), strict=True):
        for name, tensor in params.items():
            tensor.data = wanted[name].clone()
    for params in world.targets:
        for tensor in params.values():
            tensor.data = tensor.clone()
    world.flip(world.write(1, slot=1))
    assert world.target_holds(seed=7)


def test_trained_parameters_keep_their_gradient_machinery(
    make_world: BuildWorld, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = make_world()
    params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in world.sources[0].items()}
    folder = tmp_path_factory.mktemp("segments")
    folder.chmod(0o700)
    writer = SnapshotWriter(world.plan, 0, params, folder, 1)
    digests = writer.write(3, 0, 0)
    assert digests == world.write(3, slot=0).digests
    assert all(param.requires_grad and param.grad_fn is None for param in params.values())
    writer.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params.pop("decoder.final_layernorm.weight"), "decoder.final_layernorm.weight is missing"),
        (lambda params: params.update(other=torch.zeros(1)), "other is not in the layout"),
        (
            lambda params: params.update({"decoder.final_layernorm.weight": torch.zeros(17)}),
            r"decoder.final_layernorm.weight is float32 \[17\], the layout says float32 \[16\]",
        ),
        (
            lambda params: params.update({"decoder.final_layernorm.weight": torch.zeros(16, dtype=torch.float16)}),
            r"decoder.final_layernorm.weight is float16 \[16\], the layout says float32 \[16\]",
        ),
    ],
)
def test_parameters_that_do_not_match_the_plan_are_named(
    make_world: BuildWorld,
    tmp_path_factory: pytest.TempPathFactory,
    change: Callable[[Any], object],
    message: str,
) -> None:
    world = make_world()
    folder = tmp_path_factory.mktemp("segments")
    folder.chmod(0o700)
    params = dict(world.sources[0])
    change(params)
    with pytest.raises(WeightTransferError, match=f"rank 0 do not match megatron tp=1 pp=1 dp=1: {message}"):
        SnapshotWriter(world.plan, 0, params, folder, 2)
    assert list(folder.iterdir()) == []
