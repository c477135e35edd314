"""A trainer or generator rank in a process of its own, for the tests of transports; `Peer` of conftest.py runs it.

It gets `SPEC` and a pipe for its events. With `pause_after` it stops in the middle of a version: it sends
{"paused": true} and waits to be killed, stopped or continued.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from engine import transport
from engine.families import megatron_layout, vllm_layout
from engine.membership import MembershipBoard
from engine.plan import Plan, make_plan
from engine.relay import Meeting, RelayReceiver
from engine.transport import BucketReceiver, TransportError, Verifier
from engine.transport_group import Communicator, GroupSpec, Rendezvous
from engine.transport_memory import SharedMemoryBuckets
from engine.transport_p2p import PointToPointReceiver, PointToPointSender
from engine.types import Manifest

SPEC: dict[str, Any] = globals()["SPEC"]
EVENTS: Any = globals()["EVENTS"]


def say(**event: object) -> None:
    """Send an event."""
    EVENTS.send(event)


def pause() -> None:
    """Wait for a signal: the test kills this process, or sends SIGUSR1 to let it go on."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    say(paused=True)
    signal.pause()


def paused_at(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """`call`, which pauses before its `number`-th call."""
    calls = []

    def counted(*args: Any) -> Any:  # noqa: ANN401 - whatever `call` takes
        calls.append(1)
        if len(calls) == number:
            pause()
        return call(*args)

    return counted


def plan_of(spec: dict[str, Any]) -> Plan:
    """The world's plan."""
    source = megatron_layout(spec["config"], tp=spec["tp"], pp=1, dp=1, dtype="float32")
    target = vllm_layout(spec["config"], tp=spec["target_tp"], dtype="float32")
    return make_plan(source, target, bucket_bytes=spec["bucket_bytes"])


def manifest_of(meet: Rendezvous, version: int) -> Manifest:
    """The manifest that the test put into the rendezvous."""
    fields = json.loads(meet.connection("manifests").get(str(version)).decode())
    return Manifest(**fields | {"digests": {int(key): value for key, value in fields["digests"].items()}})


def receive(receiver: BucketReceiver, manifest: Manifest, timeout_s: float) -> str:
    """Fetch everything and return the digest of it."""
    digest = xxhash.xxh3_128()
    for bucket in receiver.order:
        out = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        receiver.fetch(manifest, bucket.id, out, timeout_s=timeout_s)
        digest.update(out.numpy().data)
    return digest.hexdigest()


def run_receiver(spec: dict[str, Any], meet: Rendezvous) -> None:
    """A generator rank: in epoch e it receives version e + 1, over its own group or the relay."""
    plan, replica, rank = plan_of(spec), spec["replica"], spec["rank"]
    board = MembershipBoard(Rendezvous.join(spec["address"]))
    for epoch in range(spec["num_epochs"]):
        membership = board.await_epoch(epoch, timeout_s=60)
        if replica not in membership.replicas:
            return

        receiver: BucketReceiver
        if spec["relay"]:
            meeting = Meeting(rendezvous=meet, timeout_s=60)
            receiver = RelayReceiver(plan, replica, rank, membership, meeting, stall_s=spec["stall_s"])
        else:
            sources = plan.source.num_ranks
            group = GroupSpec.between("trainer", sources, replica, plan.target.num_ranks, epoch=epoch)
            joined = Communicator(meet, group, sources + rank, timeout_s=60, backend=spec["backend"])
            receiver = PointToPointReceiver(plan, rank, joined)
        error, digest = None, None
        try:
            digest = receive(receiver, manifest_of(meet, epoch + 1), spec["timeout_s"])
        except TransportError as failure:
            error = failure
        sent = 0
        if isinstance(receiver, RelayReceiver):
            board.report(epoch, epoch + 1, receiver.outcome(error))
            sent = receiver.bytes_sent
        say(epoch=epoch, digest=digest, error=None if error is None else str(error), bytes_sent=sent)
        receiver.close()


def run_sender(spec: dict[str, Any], meet: Rendezvous) -> None:
    """A training rank: sends version 1 to one replica."""
    plan = plan_of(spec)
    spec_of_group = GroupSpec.between("trainer", plan.source.num_ranks, spec["replica"], plan.target.num_ranks, epoch=0)
    buckets = SharedMemoryBuckets(plan, Path(spec["folder"]), num_slots=2)
    buckets.payload = paused_at(buckets.payload, spec["pause_after"])
    group = Communicator(meet, spec_of_group, spec["rank"], timeout_s=60)
    sender = PointToPointSender(plan, spec["rank"], group, buckets)
    say(sent=sender.send(manifest_of(meet, 1), timeout_s=spec["timeout_s"]))


def main() -> None:
    """Do what the argument says."""
    spec = SPEC
    transport.CHUNK_BYTES = spec["chunk_bytes"]
    meet = Rendezvous.join(spec["address"])
    if spec["device"] is not None:
        torch.cuda.set_device(spec["device"])
    if spec["role"] == "sender":
        run_sender(spec, meet)
    else:
        Verifier.update = paused_at(Verifier.update, spec["pause_after"])
        run_receiver(spec, meet)


if __name__ == "__main__":
    main()
