"""What runs in a tensor-parallel worker of a vLLM replica: vLLM's worker process, extended by what a flip needs.

vLLM imports this module in the worker and mixes `WorkerExtension` into its worker class (`worker_extension_cls`); the
generator's process calls it through `collective_rpc`. Only names, manifests and numbers pass, never tensors.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.layout import TensorSpec
from engine.shared_folder import WeightTransferError
from engine.types import Manifest
from engine.vllm_weights import LiveWeights
from engine.worker_process import ignore_interrupt, pin_threads

if TYPE_CHECKING:
    import torch

    from engine.plan import Plan
    from engine.receiver import Receiver

EXTENSION = "engine.vllm_rank.WorkerExtension"
METHOD = "asyncrl_call"

_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = Path("/dev/shm")
_WATCHED = "asyncrl_watches_queues"
_hooked: list[bool] = []
_forking: int | None = None  # the process whose forked children are to die with it
_queues: list[tuple[int, Any]] = []  # process that made it, weak reference: a forked worker has its parent's list too


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank answered.

    Attributes:
        value: the method's, None if it raised.
        error: what it raised, None if it did not: the message.
        kind: the error's class name; "WeightTransferError" for its kinds too.
        poisoned: whether the rank's parameters are of two versions.
    """

    value: Any = None
    error: str | None = None
    kind: str = ""
    poisoned: bool = False


class RankWeights:
    """One rank's side of a replica. Its methods are called on all ranks at once, with the same arguments."""

    def __init__(self, rank: int, model: torch.nn.Module) -> None:
        """Args:
        rank: in the replica, and of the plan's target.
        model: vLLM's part of the model on this rank.
        """
        self._rank = rank
        self._weights = LiveWeights(model)
        self._receiver: Receiver | None = None

    @property
    def poisoned(self) -> bool:
        """See `Receiver.poisoned`."""
        return self._receiver is not None and self._receiver.poisoned

    def place(self, cpus: tuple[tuple[int, ...], ...] | None) -> int:
        """Bind this process to its cores, entry `rank`; leave Ctrl-C to the driver; say who it is: its process id.

        Also take away the names of vLLM's shared memory, which all have mapped by now.
        """
        ignore_interrupt()
        # A fork of Ray's worker goes by that one's name.
        Path("/proc/self/comm").write_text(f"asyncrl-rank-{self._rank}")
        unname_queues()
        group = os.environ.get("VLLM_DIST_IDENT")
        if group is not None:
            for path in _SHARED_MEMORY.glob(f"{group}-*"):  # in which CPU ranks add up; vLLM never removes it
                path.unlink(missing_ok=True)
        if cpus is not None:
            pin_threads(cpus[self._rank])
        return os.getpid()

    def specs(self) -> dict[str, TensorSpec]:
        """See `LiveWeights.specs`."""
        return self._weights.specs()

    def attach(self, plan: Plan, folder: Path, num_slots: int) -> None:
        """See `LiveWeights.receiver`."""
        self._receiver = self._weights.receiver(plan, self._rank, folder, num_slots)

    def prepare(self, manifest: Manifest) -> None:
        """Verify this rank's buckets. See `Receiver.prepare`."""
        self._attached().prepare(manifest)

    def apply(self, manifest: Manifest) -> tuple[set[str], int]:
        """Write this rank's parameters. See `Receiver.apply`."""
        return self._attached().apply(manifest)

    def repack(self, touched: Iterable[str] | None) -> int:
        """See `LiveWeights.repack`."""
        return self._weights.repack(touched)

    def close(self) -> None:
        """Unmap the run's shared memory."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _attached(self) -> Receiver:
        assert self._receiver is not None, "attach comes first"
        return self._receiver


class WorkerExtension:
    """Mixed into vLLM's worker class, whose `rank` and `model_runner` it uses."""

    rank: int
    model_runner: Any
    asyncrl_weights: RankWeights | None = None

    def asyncrl_call(self, method: str, *args: Any) -> Answer:  # noqa: ANN401
        """Call a method of this rank's `RankWeights`.

        Never raises: vLLM stops reading answers at the first rank that does, and takes what the others answered for
        the answers to the next call.
        """
        if self.asyncrl_weights is None:
            self.asyncrl_weights = RankWeights(self.rank, self.model_runner.get_model())
        weights = self.asyncrl_weights
        try:
            return Answer(value=getattr(weights, method)(*args), poisoned=weights.poisoned)
        except Exception as error:  # noqa: BLE001 - handed on as it is
            kind = (WeightTransferError if isinstance(error, WeightTransferError) else type(error)).__name__
            return Answer(error=str(error), kind=kind, poisoned=weights.poisoned)


def watch_queues() -> None:
    """Have `unname_queues` know the shared memory that vLLM's message queues create from now on; safe to call again.

    Source: `vllm.distributed.device_communicators.shm_broadcast.ShmRingBuffer`, whose creator removes it when it ends
    in good order; after a kill Python's resource tracker would, unless it is killed too, as Ray does it.
    """
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    create = ShmRingBuffer.__init__
    if getattr(create, _WATCHED, False):
        return

    def create_and_remember(buffer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        create(buffer, *args, **kwargs)
        _queues.append((os.getpid(), weakref.ref(buffer)))

    setattr(create_and_remember, _WATCHED, True)
    ShmRingBuffer.__init__ = create_and_remember


def unname_queues() -> None:
    """Take away the names of this process's queues, which everybody has mapped: nothing is left, whoever is killed."""
    for pid, reference in _queues:
        buffer = reference()
        if pid == os.getpid() and buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False  # it would unlink once more
    _queues.clear()


@contextmanager
def children_die_with_us() -> Iterator[None]:
    """Have every process that is forked within the block end with this one. A spawned worker sees to it by itself."""
    global _forking
    if not _hooked:
        os.register_at_fork(after_in_child=_after_fork)
        _hooked.append(True)
    _forking = os.getpid()
    try:
        yield
    finally:
        _forking = None


def die_with(parent: int) -> None:
    """Have the kernel end this process with the thread that started it, however that ended.

    vLLM's own pipe to its parent is watched only once the model is loaded.

    Args:
        parent: process id of the parent.

    Raises:
        OSError: this system has no such thing.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")

    if os.getppid() != parent:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def _after_fork() -> None:
    global _forking
    parent, _forking = _forking, None
    if parent is not None:
        die_with(parent)


def _in_spawned_worker() -> None:
    """What a forked worker inherits, before vLLM makes the model."""
    from engine.vllm_cpu import prepare_process

    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid)
        prepare_process()
        watch_queues()


_in_spawned_worker()  # vLLM imports this module in the worker; elsewhere this does nothing
