"""CUDA IPC: the segment's logic on the CPU, with the mapping replaced; the mapping itself where there is a device."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import transport_cuda_ipc
from engine.transport import BucketReceiver, BucketSender, TransportError
from engine.transport_cuda_ipc import CudaIpcReceiver, CudaIpcSender
from engine.transport_memory import SharedMemoryBuckets

World = Any  # conftest's
MakeWorld = Callable[..., World]

READER = """
import json, sys
from pathlib import Path
import torch
from engine.transport_cuda_ipc import _attach, _read_handle
memory = _attach(_read_handle(Path(sys.argv[1])), int(sys.argv[2]))
print(json.dumps([str(memory.device), memory[:8].tolist()]))
"""


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping within this process: handles are numbers."""
    memories: list[torch.Tensor] = []

    def export(memory: torch.Tensor) -> dict[str, Any]:
        memories.append(memory)
        fields = dict.fromkeys(transport_cuda_ipc._HANDLE_FIELDS, 0)
        return {"device_uuid": "", "num_bytes": memory.numel(), **fields, "handle": len(memories) - 1}

    monkeypatch.setattr(transport_cuda_ipc, "_export", export)
    monkeypatch.setattr(transport_cuda_ipc, "_attach", lambda handle, num_bytes: memories[handle["handle"]])


def ends(world: World, device: str = "cpu") -> tuple[list[BucketSender], BucketReceiver]:
    """Senders of all source ranks and the receiver of target rank 0."""
    sealed = SharedMemoryBuckets(world.plan, world.folder, world.num_slots)
    senders: list[BucketSender] = [
        CudaIpcSender(
            world.plan, rank, world.folder, world.num_slots, sealed, device=torch.device(device), readers=["g-0"]
        )
        for rank in range(world.plan.source.num_ranks)
    ]
    return senders, CudaIpcReceiver(world.plan, 0, world.folder, world.num_slots, reader="g-0")


@pytest.mark.usefixtures("mapped")
def test_a_version_crosses_and_another_one_is_named(make_world: MakeWorld) -> None:
    world = make_world(tp=2, bucket_bytes=1000)
    senders, receiver = ends(world)
    manifest = world.write(1, slot=1)
    assert sum(sender.send(manifest, timeout_s=5) for sender in senders) == world.plan.num_bytes
    sealed = SharedMemoryBuckets(world.plan, world.folder, world.num_slots)
    for bucket in receiver.order:
        out = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        receiver.fetch(manifest, bucket.id, out, timeout_s=5)
        assert torch.equal(out, sealed.payload(manifest, bucket.id))

    handle = world.folder / "source-00000.g-0.cuda"
    assert stat.S_IMODE(handle.stat().st_mode) == 0o600
    world.train(seed=2)
    second = world.write(2, slot=1)
    out = torch.zeros(world.plan.buckets[0].num_bytes, dtype=torch.uint8)
    with pytest.raises(TransportError, match=r"bucket 0 of source rank 0, .*: version is 1, want 2; digest is"):
        receiver.fetch(second, 0, out, timeout_s=5)
    for end in (receiver, *senders):
        end.close()
    assert not handle.exists()


@pytest.mark.usefixtures("mapped")
def test_a_flipped_bit_is_named(make_world: MakeWorld) -> None:
    world = make_world(bucket_bytes=1000)
    (sender,), receiver = ends(world)
    manifest = world.write(1, slot=0)
    sender.send(manifest, timeout_s=5)
    memory: torch.Tensor = sender._memory
    memory[80 + 48 + 5] ^= 1  # the first header takes 128 bytes
    out = torch.zeros(world.plan.buckets[0].num_bytes, dtype=torch.uint8)
    with pytest.raises(TransportError, match=r"bucket 0 of source rank 0, .*: the payload hashes to"):
        receiver.fetch(manifest, 0, out, timeout_s=5)


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no handle of a device segment: Expecting"), ("{}", "'device_uuid', 'event_handle', .* are missing")],
)
def test_a_damaged_handle_is_named(make_world: MakeWorld, text: str, message: str) -> None:
    world = make_world(bucket_bytes=1000)
    _, receiver = ends(world)
    (world.folder / "source-00000.g-0.cuda").write_text(text)
    out = torch.zeros(world.plan.buckets[0].num_bytes, dtype=torch.uint8)
    with pytest.raises(TransportError, match=message):
        receiver.fetch(world.write(1, slot=0), 0, out, timeout_s=5)


def test_a_segment_that_is_not_there_is_named(make_world: MakeWorld) -> None:
    world = make_world(bucket_bytes=1000)
    receiver = CudaIpcReceiver(world.plan, 0, world.folder, world.num_slots, reader="g-7")
    out = torch.zeros(world.plan.buckets[0].num_bytes, dtype=torch.uint8)
    with pytest.raises(TransportError, match=r"source-00000\.g-7\.cuda: No such file"):
        receiver.fetch(world.write(1, slot=0), 0, out, timeout_s=5)


@pytest.mark.gpu(reason="cudaIpcGetMemHandle and cudaIpcOpenMemHandle need a device that two processes map")
def test_another_process_maps_the_segment(make_world: MakeWorld) -> None:
    world = make_world(bucket_bytes=1000)
    (sender,), _ = ends(world, device="cuda:0")
    sender.send(world.write(1, slot=0), timeout_s=30)
    memory: torch.Tensor = sender._memory
    handle: Path = world.folder / "source-00000.g-0.cuda"
    command = [sys.executable, "-c", READER, str(handle), str(memory.numel())]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert json.loads(output) == ["cuda:0", memory[:8].tolist()]
    sender.close()
