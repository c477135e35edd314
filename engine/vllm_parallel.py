"""A vLLM engine whose model is divided among tensor-parallel workers, processes of their own.

The engine core (scheduler, requests) stays in this process and is stepped as with one rank; vLLM's multiprocessing
executor sends each step to the workers. What a flip needs is sent the same way, see `engine.vllm_rank`.
A worker that dies takes the others with it and is named; workers end with this process, however it ends.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

import anyio

from engine.generate_call import GeneratorError
from engine.inference_engine import InferenceEngine
from engine.layout import TensorSpec
from engine.shared_folder import WeightTransferError
from engine.types import Manifest
from engine.vllm_engine import EngineSpec, FinishedSample, VllmEngine, make_core
from engine.vllm_rank import METHOD, Answer, children_die_with_us, unname_queues, watch_queues
from engine.worker_process import divide_cores

if TYPE_CHECKING:
    from engine.plan import Plan


class RankDied(GeneratorError):
    """A tensor-parallel worker of this replica has ended."""


def start_engine(spec: EngineSpec) -> InferenceEngine:
    """Start the engine of one replica: in this process alone, or with one worker process a rank."""
    return VllmEngine(spec) if spec.tp == 1 else ParallelVllmEngine(spec)


class ParallelVllmEngine(VllmEngine):
    """See `VllmEngine`; `RankDied` is what every method raises once a worker has died."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start the workers, which load the model. Takes seconds.

        Raises:
            RuntimeError: as `VllmEngine`; or a worker did not start, and has written why to its standard error.
        """
        self._ranks = _Ranks(spec.tp)
        with ExitStack() as started:
            started.callback(self._ranks.close)
            self._folder = started.enter_context(TemporaryDirectory(prefix="asyncrl-tp-"))
            super().__init__(spec)
            started.callback(super().close)
            cpus = divide_cores(spec.cpus, spec.tp, spec.num_threads or 1) if spec.cpus is not None else None
            self._pids: tuple[int, ...] = tuple(self._ranks.call("place", cpus))
            unname_queues()
            self._resources = started.pop_all()

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._pids

    def param_specs(self) -> tuple[dict[str, TensorSpec], ...]:
        return tuple(self._ranks.call("specs"))

    def attach(self, plan: Plan, folder: Path, num_slots: int) -> ParallelReceiver:
        return ParallelReceiver(self._ranks, plan, folder, num_slots)

    async def died(self) -> str:
        return await self._ranks.died()

    def step(self) -> list[FinishedSample]:
        try:
            return super().step()
        except RuntimeError as error:
            self._ranks.raise_if_died(error)
            raise

    def repack(self, touched: Iterable[str] | None) -> int:
        names = tuple(touched) if touched is not None else None
        return sum(self._ranks.call("repack", names))

    def close(self) -> None:
        self._resources.close()

    def _start_core(self, config: Any) -> Any:  # noqa: ANN401 - vLLM has no types for us
        from engine.vllm_cpu import fork_workers, needs_repack

        if needs_repack():
            fork_workers()
        watch_queues()
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # a replica is on one machine
        # vLLM's sockets and its rendezvous file, which it leaves behind, go where nobody else can look.
        os.environ["VLLM_RPC_BASE_PATH"] = self._folder
        before, tempfile.tempdir = tempfile.tempdir, self._folder
        try:
            with children_die_with_us():
                return make_core(config, self._ranks.executor_class())
        finally:
            tempfile.tempdir = before


class ParallelReceiver:
    """One `engine.receiver.Receiver` a rank, together (invariant *whole versions*).

    A version is prepared once every rank has proven its own part, and then applied on every rank. If it fails on one
    after any rank has written, all of them are poisoned: the replica is of two versions, though each rank may be whole.
    """

    def __init__(self, ranks: _Ranks, plan: Plan, folder: Path, num_slots: int) -> None:
        """Raises:
        WeightTransferError: the parameters of a rank are not those of the plan.
        """
        if plan.target.num_ranks != ranks.num_ranks:
            raise ValueError(f"the plan's target has {plan.target.num_ranks} ranks, this replica {ranks.num_ranks}")

        self._ranks = ranks
        self._poisoned = False
        ranks.call("attach", plan, folder, num_slots)

    @property
    def poisoned(self) -> bool:
        """Whether the ranks' parameters may be of two versions, and must not be used."""
        return self._poisoned

    def prepare(self, manifest: Manifest) -> None:
        """Prove on every rank that its part of a version is whole.

        Raises:
            WeightTransferError: the first rank's, in order, that could not; names the rank.
        """
        self._ranks.call("prepare", manifest)

    def apply(self, manifest: Manifest) -> tuple[set[str], int]:
        """Write a prepared version on every rank; the parameters' names, and the bytes of all ranks together.

        Raises:
            WeightTransferError: a rank could not. If any has written, the replica is poisoned until an apply succeeds.
            RankDied: a worker is gone; poisoned for good.
        """
        before, self._poisoned = self._poisoned, True
        answers = self._ranks.ask("apply", manifest)
        if all(answer.error is not None and not answer.poisoned for answer in answers):
            self._poisoned = before  # nobody has written a byte
        self._ranks.raise_first(answers)
        self._poisoned = False
        touched, num_bytes = zip(*(answer.value for answer in answers), strict=True)
        return set().union(*touched), sum(num_bytes)

    def close(self) -> None:
        """Unmap the run's shared memory on every rank, if they live."""
        if self._ranks.death is None:
            self._ranks.call("close")


class _Ranks:
    """The workers of one replica: calls to all of them, and a watch on their lives.

    Attributes:
        num_ranks: how many.
        death: which one died first, and how; None while all live.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.death: str | None = None
        self._executor: Any = None
        self._death_reader, self._death_writer = os.pipe()

    def executor_class(self) -> type:
        """vLLM's multiprocessing executor, watched by us."""
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        ranks = self

        class ReplicaExecutor(MultiprocExecutor):  # type: ignore[misc]
            def start_worker_monitor(self, inline: bool = False) -> None:
                assert not inline
                ranks._executor = self
                Thread(target=ranks._wait_for_death, args=(self,), daemon=True, name="asyncrl-ranks").start()

        return ReplicaExecutor

    def call(self, method: str, *args: Any) -> list[Any]:  # noqa: ANN401
        """Call a method of `engine.vllm_rank.RankWeights` on all ranks at once; their answers by rank."""
        answers = self.ask(method, *args)
        self.raise_first(answers)
        return [answer.value for answer in answers]

    def ask(self, method: str, *args: Any) -> list[Answer]:  # noqa: ANN401
        """Like `call`, but errors are among the answers.

        Raises:
            RankDied: one has died, before or meanwhile.
        """
        self.raise_if_died(None)
        try:
            answers: list[Answer] = self._executor.collective_rpc(METHOD, args=(method, *args))
        except RuntimeError as error:
            self.raise_if_died(error)
            raise

        return answers

    def raise_first(self, answers: Sequence[Answer]) -> None:
        """Raise what the first rank that failed raised, as far as this process knows the class."""
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                where = f"tensor-parallel rank {rank} of {self.num_ranks}"
                if answer.kind == WeightTransferError.__name__:
                    raise WeightTransferError(f"{where}: {answer.error}")

                raise RuntimeError(f"{where}: {answer.kind}: {answer.error}")

    def raise_if_died(self, cause: BaseException | None) -> None:
        """Raise RankDied if a worker has died."""
        if self.death is not None:
            raise RankDied(self.death) from cause

    async def died(self) -> str:
        """Wait for a worker's death, and say which."""
        await anyio.wait_readable(self._death_reader)
        assert self.death is not None
        return self.death

    def close(self) -> None:
        """After the executor's shutdown."""
        for end in (self._death_reader, self._death_writer):
            os.close(end)

    def _wait_for_death(self, executor: Any) -> None:  # noqa: ANN401
        """On a thread of its own: vLLM's own watch says which one died to a log only, and gives the others 9 s."""
        processes = [worker.proc for worker in executor.workers]
        ended = connection.wait([process.sentinel for process in processes])
        if getattr(executor, "shutting_down", False):
            return

        rank = next(index for index, process in enumerate(processes) if process.sentinel in ended)
        self.death = f"tensor-parallel rank {rank} (process {processes[rank].pid}) died: {_how(processes[rank])}"
        executor.is_failed = True
        for process in processes:
            process.kill()  # it may wait for the dead one, within a kernel
        os.write(self._death_writer, b"!")
        executor.shutdown()  # ends a call that waits for answers


def _how(process: Any) -> str:  # noqa: ANN401
    process.join(1)
    code = process.exitcode
    if code is None:
        return "its process is gone"

    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
