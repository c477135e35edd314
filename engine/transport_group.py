"""Process groups of trainers and generators, apart from the processes' default group, and where they meet.

API (torch 2.13): `torch.distributed.TCPStore` and `PrefixStore` to meet; the backend classes `ProcessGroupGloo` and
`ProcessGroupNCCL`, built from a store directly and never registered as the default group (that one is Megatron's);
their `send`/`recv([tensor], rank, tag)` return a `Work`.

What was measured with gloo of torch 2.13 and is relied on here:
- `Work.wait(timedelta)` raises after that time, and gloo then closes every connection of that group. Hence one group a
  replica: a slow replica costs its own group and no other.
- a killed peer resets its connections: waits on it raise within milliseconds.
- `ProcessGroupGloo.abort()` does not wake a thread that waits for `send` or `recv`; the wait's own deadline does.
  Dropping the group and every `Work` of it closes its connections, which wakes the peers. One `Work` in the traceback
  of an error that somebody keeps would be enough to leave them waiting.
NCCL has no deadline on the host: a timer aborts the communicator (`ProcessGroupNCCL.abort`), which ends its kernels.
The NCCL path has not run: the tests for it need two CUDA devices.

A TCPStore has no passwords: it listens on 127.0.0.1 unless a host is given, and that host's network must be trusted.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from engine.transport import Deadline, TransportError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, Work

LOOPBACK = "127.0.0.1"

_TAG = 0  # messages between two members arrive in order; a message out of turn is then seen, not waited for


class Rendezvous:
    """A TCPStore: one process hosts it, the others join by its address.

    Attributes:
        address: "host:port".
    """

    def __init__(self, store: Store, address: str) -> None:
        self._store: Any = store  # torch's stub lacks `clone`
        self.address = address

    @classmethod
    def host(cls, *, host: str = LOOPBACK, timeout_s: float = 30.0) -> Rendezvous:
        """Listen on a free port of `host` (an address of this machine) and on no other interface."""
        with socket.create_server((host, 0), backlog=1024) as listener:  # TCPStore itself would listen on all
            port = listener.getsockname()[1]
            seconds = timedelta(seconds=timeout_s)
            store = TCPStore(
                host, port, None, True, seconds, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return cls(store, f"{host}:{port}")

    @classmethod
    def join(cls, address: str, *, timeout_s: float = 30.0) -> Rendezvous:
        """Connect to the process that hosts it.

        Raises:
            TransportError: nobody answers at this address in time.
        """
        host, _, port = address.rpartition(":")
        try:
            store = TCPStore(host, int(port), None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        except dist.DistError as error:
            raise TransportError(f"no rendezvous at {address} within {timeout_s:g} s: {_brief(error)}") from error

        return cls(store, address)

    def connection(self, prefix: str) -> Store:
        """Return a connection of one's own to what lies below a prefix, one a thread: a wait blocks its connection."""
        return PrefixStore(prefix, self._store.clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Who is in a joint group.

    Attributes:
        name: of the group, without its epoch.
        epoch: of the membership; a group is never repaired, the next epoch's is built.
        members: their names, as errors say them; a member's rank is its place.

    Example: two training ranks and one generator rank are ("trainer rank 0", "trainer rank 1", "generator-0 rank 0").
    """

    name: str
    epoch: int
    members: tuple[str, ...]

    @classmethod
    def between(cls, sources: str, num_sources: int, targets: str, num_targets: int, *, epoch: int) -> GroupSpec:
        """The ranks of `sources` ("trainer") that hold buckets, then the ranks of `targets` ("generator-0")."""
        members = [f"{sources} rank {rank}" for rank in range(num_sources)]
        members += [f"{targets} rank {rank}" for rank in range(num_targets)]
        return cls(name=f"{sources} to {targets}", epoch=epoch, members=tuple(members))


class Communicator:
    """This process's end of a joint group.

    Attributes:
        spec, rank: which group, and who we are in it.
        bytes_sent: of messages whose send has ended, headers included.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        spec: GroupSpec,
        rank: int,
        *,
        timeout_s: float,
        backend: str = "gloo",
        host: str = LOOPBACK,
    ) -> None:
        """Meet the other members; all of them call this.

        Args:
            rendezvous: where.
            spec, rank: equal on all members but for the rank.
            timeout_s: longest wait for the others.
            backend: "gloo", or "nccl" (messages then pass through a buffer on the current CUDA device).
            host: the address of this machine that gloo uses.

        Raises:
            TransportError: not all members came in time.
        """
        assert 0 <= rank < len(spec.members), f"{spec.name}: rank {rank} is not in [0, {len(spec.members)})"
        self.spec, self.rank, self.bytes_sent = spec, rank, 0
        self._device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
        self._dead: str | None = None
        self._under_way: set[Transfer] = set()
        store = rendezvous.connection(f"{spec.name}/{spec.epoch}")
        make = {"gloo": _gloo, "nccl": _nccl}[backend]
        try:
            self._group: Any = make(store, rank, len(spec.members), timedelta(seconds=timeout_s), host)
        except RuntimeError as error:
            raise TransportError(
                f"{self}: not all of {', '.join(spec.members)} came within {timeout_s:g} s: {_brief(error)}"
            ) from error

    def __str__(self) -> str:
        return f"group {self.spec.name!r} of epoch {self.spec.epoch}, {self.spec.members[self.rank]}"

    @property
    def dead(self) -> bool:
        """Whether it has failed or was given up; it is then of no more use."""
        return self._dead is not None

    def send(self, message: torch.Tensor, peer: int) -> Transfer:
        """Start to send a dense uint8 tensor; it must not change until the transfer has ended."""
        what = f"sending {message.numel()} bytes to {self.spec.members[peer]}"
        staged = message.to(self._device)
        return Transfer(self, self._start("send", staged, peer, what), what, peer, staged, sent=message.numel())

    def recv(self, out: torch.Tensor, peer: int) -> Transfer:
        """Start to receive into a dense uint8 tensor, which is whole when the transfer has ended."""
        what = f"receiving {out.numel()} bytes from {self.spec.members[peer]}"
        staged = out if out.device == self._device else torch.empty_like(out, device=self._device)
        return Transfer(self, self._start("recv", staged, peer, what), what, peer, staged, out=out)

    def abort(self, reason: str) -> None:
        """Give the group up: the peers' waits end, every later use here is an error with this reason. Idempotent."""
        if self._dead is None:
            self._dead = reason
            if self._device.type == "cuda":  # gloo's would do nothing more than what the next line does
                self._group.abort()
            self._group = None
            # gloo closes its connections when the last of its objects is gone, those of messages under way included.
            for transfer in self._under_way:
                transfer.forget()
            self._under_way.clear()

    def close(self) -> None:
        """Leave the group."""
        self.abort("closed")

    def _start(self, verb: str, tensor: torch.Tensor, peer: int, what: str) -> Work:
        if self._dead is not None:
            raise TransportError(f"{self}: {what}: the group was given up: {self._dead}", peer=self.spec.members[peer])

        try:
            work: Work = getattr(self._group, verb)([tensor], peer, _TAG)
        except RuntimeError as error:
            raise self._failed(what, peer, error) from error

        return work

    def _failed(self, what: str, peer: int, error: Exception) -> TransportError:
        message = f"{self}: {what}: {_brief(error)}"
        self.abort(message)
        return TransportError(message, peer=self.spec.members[peer])

    def _wait(self, work: Work, deadline: Deadline) -> None:
        """Wait for a transfer; raise RuntimeError when it has failed or the deadline has passed."""
        seconds = max(deadline.remaining_s, 1e-3)  # gloo takes 0 for "for ever"
        try:
            if self._device.type == "cpu":
                work.wait(timedelta(seconds=seconds))
            else:
                self._wait_for_device(work, seconds)
        finally:
            del work  # the traceback of an error must not keep it: see `abort`
        if self._device.type == "cuda" and deadline.remaining_s == 0:
            raise RuntimeError(f"not done within {deadline.timeout_s:g} s")

    def _wait_for_device(self, work: Work, seconds: float) -> None:
        timer = threading.Timer(seconds, self._group.abort)
        timer.start()
        try:
            work.wait()
            torch.cuda.current_stream().synchronize()
        finally:
            timer.cancel()
            del work


class Transfer:
    """A message on its way."""

    def __init__(
        self,
        group: Communicator,
        work: Work,
        what: str,
        peer: int,
        staged: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        sent: int = 0,
    ) -> None:
        self._group, self._what, self._peer = group, what, peer
        self._work: Work | None = work
        self._staged, self._out, self._sent = staged, out, sent
        group._under_way.add(self)

    def wait(self, deadline: Deadline) -> None:
        """Wait for its end.

        Raises:
            TransportError: the peer is gone, or the deadline has passed; the group was given up.
        """
        try:
            if self._work is None:
                raise RuntimeError(f"the group was given up: {self._group._dead}")

            self._group._wait(self._work, deadline)
        except RuntimeError as error:
            raise self._group._failed(self._what, self._peer, error) from error

        if self._out is not None and self._out is not self._staged:
            self._out.copy_(self._staged)
        self.forget()
        self._group._under_way.discard(self)
        self._group.bytes_sent += self._sent

    def forget(self) -> None:
        """Let go of torch's object: an error that somebody keeps would else keep it, and its connection."""
        self._work = None


def _gloo(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:  # noqa: ANN401 - torch's
    gloo: Any = dist.ProcessGroupGloo  # torch's stub has its options under another name
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Any:  # noqa: ANN401 - torch's
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _brief(error: Exception) -> str:
    """The first sentence of one of torch's messages, without its source file."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition("gloo/")[2].partition("] ")[2].split(". ")[0] or text.split(". ")[0]
