"""Ranks in processes of their own, which meet on the loopback; payloads are cut into small chunks."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import runpy
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from engine import transport
from engine.transport_group import Rendezvous
from engine.transport_memory import SharedMemoryBuckets
from engine.transport_p2p import transfer_order
from engine.types import Manifest

World = Any  # tests/engine/conftest.py's
MakePeer = Callable[..., "Peer"]
PEER = Path(__file__).parent / "peer.py"
CHUNK_BYTES = 256  # most buckets are several chunks


# Peers are forked from a process that has imported all this once: a fresh interpreter needs seconds for torch.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["engine.relay", "engine.families"])


class Peer:
    """A rank in a process of its own."""

    def __init__(self, world: World, meet: Rendezvous, **spec: object) -> None:
        sizes = {name: getattr(world, name) for name in ("config", "tp", "target_tp", "bucket_bytes")}
        defaults = {"role": "receiver", "rank": 0, "relay": False, "num_epochs": 1, "pause_after": 0, "timeout_s": 10}
        defaults |= {"backend": "gloo", "device": None}
        fixed = {"address": meet.address, "folder": str(world.folder), "chunk_bytes": CHUNK_BYTES}
        self._events, events = _CONTEXT.Pipe(duplex=False)
        names = {"SPEC": sizes | defaults | fixed | spec, "EVENTS": events}
        self._process = _CONTEXT.Process(target=runpy.run_path, args=(str(PEER), names, "__main__"), daemon=True)
        self._process.start()
        events.close()

    def event(self) -> dict[str, Any]:
        """The next thing that it says; empty when it has ended."""
        assert self._events.poll(60), "the peer says nothing"
        try:
            return self._events.recv()
        except EOFError:
            return {}

    def signal_when_paused(self, number: signal.Signals) -> threading.Thread:
        """Send a signal as soon as it stands in the middle of a version."""

        def wait() -> None:
            assert self.event() == {"paused": True}
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def close(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._events.close()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture
def meet() -> Rendezvous:
    return Rendezvous.host()


@pytest.fixture
def make_peer(meet: Rendezvous) -> Iterator[MakePeer]:
    """`make_peer(world, replica="generator-0")` starts one."""
    peers: list[Peer] = []

    def make(world: World, **spec: object) -> Peer:
        peers.append(Peer(world, meet, **spec))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def put_manifest(meet: Rendezvous) -> Callable[[Manifest], None]:
    """Let peers know a version."""

    def put(manifest: Manifest) -> None:
        meet.connection("manifests").set(str(manifest.version), json.dumps(dataclasses.asdict(manifest)))

    return put


@pytest.fixture
def digest() -> Callable[[World, Manifest, int], str]:
    """`digest(world, manifest, rank)`: of all that a target rank must receive, in its order."""

    def of(world: World, manifest: Manifest, rank: int) -> str:
        found = xxhash.xxh3_128()
        buckets = SharedMemoryBuckets(world.plan, world.folder, world.num_slots)
        for bucket in transfer_order(world.plan):
            if bucket.target_rank == rank:
                found.update(buckets.payload(manifest, bucket.id).numpy().data)
        return found.hexdigest()

    return of
