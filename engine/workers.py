"""Ray's one home: start a private cluster or join a named one, place workers, call them with a deadline and a name.

A worker is one Ray actor: a trainer rank or a generator replica. On a CPU a device is a logical slot, a custom
resource of the node, so that the number of workers is the recipe's business and not the number of cores.
Nothing above this file knows that there is Ray.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio

from engine.locked_folder import LockedFolder
from engine.ray_settings import set_private_environment, temp_root
from engine.worker_death import describe_death, describe_raised, first_line, last_line

DEVICE_RESOURCE = "asyncrl_device"
_OBJECT_STORE_BYTES = 128 << 20  # only requests and results pass here, never weights
_JOIN_S = 10.0
_TEMP_KIND = "asyncrl-ray"


class ClusterError(RuntimeError):
    """There is no Ray to place workers on."""


class WorkerError(RuntimeError):
    """A worker's method raised; the message names worker and method, `__cause__` has the worker's traceback."""


class WorkerDied(RuntimeError):
    """A worker's process is gone."""


class WorkerTimeout(RuntimeError):
    """A worker did not answer within the call's deadline."""


class PlacementError(RuntimeError):
    """The cluster has no room for a worker, or not in time."""


class Worker(Protocol):
    """A worker as the rest of asyncrl sees it."""

    name: str

    async def call(self, method: str, *args: Any, deadline_s: float | None, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run `method` on the worker and return its answer.

        Args:
            method: the method's name.
            deadline_s: seconds until WorkerTimeout. None waits for ever, for calls that last as long as the run.

        Raises:
            WorkerError: the method raised.
            WorkerDied: the process is gone.
            WorkerTimeout: no answer in time.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Where workers run.

    Attributes:
        address: of a running Ray cluster; None starts a private one on this machine, bound to loopback.
        num_devices: logical device slots of the private cluster.
        on_gpu: every slot is a GPU, of which a worker sees its own only (`CUDA_VISIBLE_DEVICES`, Ray's doing).
        placement_deadline_s: how long a worker may wait for its slot and its process.
    """

    address: str | None
    num_devices: int
    on_gpu: bool = False
    placement_deadline_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What to start: `cls(*args)` in a process of its own, with `environment` set before anything is imported.

    A class with async methods answers several calls at a time; another one answers one after the other, on one thread,
    but for its methods named in `beside`, each of which has a thread of its own.
    """

    name: str
    cls: type
    args: tuple[Any, ...] = ()
    num_devices: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


class RayWorker:
    """A `Worker` over a Ray actor handle."""

    def __init__(self, name: str, actor: Any, logs: Path | None, beside: Sequence[str] = ()) -> None:  # noqa: ANN401
        """Args:
        logs: the folder that the worker's output goes to, if it is on this machine.
        beside: see `WorkerSpec`.
        """
        self.name = name
        self._actor = actor
        self._logs = logs
        self._beside = frozenset(beside)
        self._answered_s = 0.0  # Unix time of the last answer

    async def call(self, method: str, *args: Any, deadline_s: float | None, **kwargs: Any) -> Any:  # noqa: ANN401
        import ray.exceptions

        where = f"{self.name}.{method}"
        try:
            with anyio.fail_after(deadline_s):
                bound = getattr(self._actor, method)
                if method in self._beside:
                    bound = bound.options(concurrency_group=method)
                answer = await bound.remote(*args, **kwargs)
        except ray.exceptions.RayTaskError as error:  # before TimeoutError: Ray's is one too if the worker's was
            raise WorkerError(f"{where} failed: {describe_raised(error)}") from error
        except ray.exceptions.RayActorError as error:
            if "error raised in its creation task" in str(error):
                raise WorkerError(f"{self.name}.__init__ failed: {last_line(error)}") from error

            asked = method if method not in self._beside else None
            text = describe_death(self.name, asked, str(error), self._logs, since_s=self._answered_s)
            raise WorkerDied(text) from error
        except ray.exceptions.UnserializableException as error:
            raise WorkerError(f"{where} failed: {last_line(error)}") from error
        except TimeoutError as error:
            raise WorkerTimeout(
                f"{where} did not answer within {deadline_s:g} s; if it is only slow, raise that deadline of the recipe"
            ) from error
        except ray.exceptions.RayError as error:
            raise WorkerError(f"{where} failed: {first_line(error)}") from error

        self._answered_s = time.time()
        return answer

    def kill(self) -> None:
        """End the process at once; a worker that is already gone is fine."""
        import ray

        ray.kill(self._actor, no_restart=True)


class Cluster:
    """The running Ray and the workers that this run placed.

    Usage: `async with Cluster(spec, environment=...) as cluster: worker = await cluster.place(worker_spec)`.
    Leaving the block ends every worker and, if it was private, Ray and its folder.
    """

    def __init__(self, spec: ClusterSpec, *, environment: Mapping[str, str]) -> None:
        """Args:
        spec: where workers run.
        environment: of every worker. Those of a private cluster inherit it, without a runtime environment (which costs
            start-up time); this process's own is as before once the cluster is up.
        """
        self._spec = spec
        self._environment = dict(environment)
        self._workers: list[RayWorker] = []
        self._temp: LockedFolder | None = None

    async def __aenter__(self) -> Cluster:
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": False}
        if self._spec.address is not None:
            _check_reachable(self._spec.address)
            options["address"] = self._spec.address
        else:
            if "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ:
                raise ClusterError("ray was imported before a private cluster could be configured; import it later")

            set_private_environment()
            self._temp = LockedFolder.create(temp_root(), _TEMP_KIND, secrets.token_hex(4))
            options.update(
                num_cpus=0,  # no worker asks for one, and Ray starts an idle process for each
                num_gpus=None if self._spec.on_gpu else 0,
                resources={DEVICE_RESOURCE: self._spec.num_devices},
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._ray_folder),
                _node_ip_address="127.0.0.1",
            )
        try:
            with self._inherited_environment(), _own_sigterm():
                _start_ray(options)
        except BaseException:
            self._remove_temp()
            raise

        return self

    async def __aexit__(self, *_: object) -> None:
        import ray

        with anyio.CancelScope(shield=True):
            try:
                for worker in self._workers:
                    worker.kill()
            finally:
                with _own_sigterm():
                    await anyio.to_thread.run_sync(ray.shutdown)
                self._remove_temp()

    @property
    def _ray_folder(self) -> Path | None:
        """Ray opens its folder to everybody, so it is one inside ours. None: the cluster is not ours."""
        return self._temp.path / "r" if self._temp is not None else None

    async def place(self, spec: WorkerSpec) -> RayWorker:
        """Start a worker and wait until its process is up (its `__init__` has run).

        Raises:
            PlacementError: no room, or not within the placement deadline; names what is wanted and what is there.
            WorkerDied: the process ended while starting.
            WorkerError: `__init__` raised.
        """
        import ray
        import ray.exceptions

        total = _resources()[0]
        if total < spec.num_devices:
            raise PlacementError(self._no_room(spec, f"no room for {spec.name}"))

        options: dict[str, Any] = {
            "num_cpus": 0,
            "resources": {DEVICE_RESOURCE: float(spec.num_devices)},
            "max_restarts": 0,
        }
        if self._spec.on_gpu:
            options["num_gpus"] = spec.num_devices
        own = {**(self._environment if self._temp is None else {}), **spec.environment}
        if own:
            options["runtime_env"] = {"env_vars": own}
        logs = self._ray_folder / "session_latest" / "logs" if self._ray_folder is not None else None
        if spec.beside:
            options["concurrency_groups"] = dict.fromkeys(spec.beside, 1)
        worker = RayWorker(spec.name, ray.remote(**options)(spec.cls).remote(*spec.args), logs, spec.beside)
        self._workers.append(worker)
        try:
            await worker.call("__ray_ready__", deadline_s=self._spec.placement_deadline_s)
        except WorkerTimeout as error:
            worker.kill()  # else it takes the next free slot
            late = f"{spec.name} has no room, or did not come up, within {self._spec.placement_deadline_s:g} s"
            slow = ". If the machine is only slow, raise cluster.placement_deadline_s"
            raise PlacementError(self._no_room(spec, late) + slow) from error

        return worker

    def _no_room(self, spec: WorkerSpec, what: str) -> str:
        total, free = _resources()
        cure = (
            "Raise cluster.devices, or use fewer ranks or replicas"
            if self._spec.address is None
            else "Give its nodes more, with `ray start --resources='{\"" + DEVICE_RESOURCE + "\": 4}'`"
        )
        wanted = f"it wants {spec.num_devices} device slot(s)"
        return f"{what}: {wanted}; the cluster has {total:g}, {free:g} of them free. {cure}"

    @contextmanager
    def _inherited_environment(self) -> Iterator[None]:
        """Set what Ray, and with it every worker of a private cluster, inherits, while Ray starts.

        The temporary folder goes with the cluster: what a worker that is killed leaves behind is then removed too.
        """
        own: dict[str, str] = {}
        if self._temp is not None:
            folder = self._temp.path / "t"
            folder.mkdir(mode=0o700)
            own = self._environment | {"TMPDIR": str(folder)}
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            yield
        finally:
            for name in own:
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in before.items() if value is not None})

    def _remove_temp(self) -> None:
        if self._temp is not None:
            self._temp.close()


async def call_all(
    workers: Sequence[Worker],
    method: str,
    *args: Any,  # noqa: ANN401
    deadline_s: float | None,
    each: Sequence[tuple[Any, ...]] | None = None,
    grace_s: float = 5.0,
) -> tuple[Any, ...]:
    """Run `method` on all workers at once; answers in the workers' order.

    Args:
        args: the same for all.
        each: every worker's own arguments, before the common ones.
        grace_s: after a first error the others have so long to answer. A rank whose peer died fails too, and often
            sooner than Ray notices the death: with a little patience the error names the one that died.

    Raises:
        WorkerDied: one died; else the first error by time.
    """
    answers: list[Any] = [None] * len(workers)
    own = each if each is not None else [()] * len(workers)
    errors: list[WorkerError | WorkerDied | WorkerTimeout] = []

    async with anyio.create_task_group() as tasks:

        async def call_one(index: int) -> None:
            try:
                answers[index] = await workers[index].call(method, *own[index], *args, deadline_s=deadline_s)
            except (WorkerError, WorkerDied, WorkerTimeout) as error:
                errors.append(error)
                died = isinstance(error, WorkerDied)
                tasks.cancel_scope.deadline = min(
                    tasks.cancel_scope.deadline, anyio.current_time() + (0.0 if died else grace_s)
                )

        for index in range(len(workers)):
            tasks.start_soon(call_one, index)

    if errors:
        raise next((error for error in errors if isinstance(error, WorkerDied)), errors[0])

    return tuple(answers)


def _resources() -> tuple[float, float]:
    """Device slots of the cluster: all, and free ones."""
    import ray

    untyped: Any = ray
    total, free = untyped.cluster_resources(), untyped.available_resources()
    return total.get(DEVICE_RESOURCE, 0.0), free.get(DEVICE_RESOURCE, 0.0)


def _start_ray(options: Mapping[str, Any]) -> None:
    """Start or join Ray. In the main thread: Ray's processes end with the thread that started them.

    Raises:
        ClusterError: it did not come up, or cannot be reached.
    """
    import ray
    from ray._private import utils, worker

    if ray.is_initialized():
        raise RuntimeError("Ray already runs in this process; leave its block before starting another cluster")

    # `log_to_driver=False` does not stop Ray from printing that a worker died; who waits for the worker is told anyway.
    worker._worker_logs_enabled = False
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None  # it would end the process in the middle of this call
    try:
        ray.init(**options)
    except (RuntimeError, ConnectionError, OSError, ValueError, ray.exceptions.RayError) as error:
        what = f"cannot join the Ray cluster at {options['address']}" if "address" in options else "Ray did not start"
        raise ClusterError(f"{what}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        utils.set_sigterm_handler = set_handler


def _check_reachable(address: str) -> None:
    """Raise ClusterError if nobody listens at "host:port": Ray would go on trying for ten minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return  # "auto", "ray://...": for Ray to find

    try:
        socket.create_connection((host, int(port)), timeout=_JOIN_S).close()
    except OSError as error:
        raise ClusterError(f"cannot join the Ray cluster at {address}: {error.strerror or error}; is it up?") from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does: Ray's core prints a stack trace, from its start on, and lets the process die after it."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
