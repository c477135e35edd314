"""Ray's one home: start a private cluster or join a named one, place workers, call them with a deadline and a name.

A worker is one Ray actor: a trainer rank or a generator replica. On a CPU a device is a logical slot, a custom
resource of the node, so that the number of workers is the recipe's business and not the number of cores.
Nothing above this file knows that there is Ray.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio

DEVICE_RESOURCE = "asyncrl_device"
_OBJECT_STORE_BYTES = 128 << 20  # only requests and results pass here, never weights


class WorkerError(RuntimeError):
    """A worker's method raised; the message names worker and method, `__cause__` is the original error."""


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
        placement_deadline_s: how long a worker may wait for its slot and its process.
    """

    address: str | None
    num_devices: int
    placement_deadline_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What to start: `cls(*args)` in a process of its own, with `environment` set before anything is imported.

    A class with async methods answers several calls at a time; another one answers one after the other.
    """

    name: str
    cls: type
    args: tuple[Any, ...] = ()
    num_devices: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


class RayWorker:
    """A `Worker` over a Ray actor handle."""

    def __init__(self, name: str, actor: Any) -> None:  # noqa: ANN401
        self.name = name
        self._actor = actor

    async def call(self, method: str, *args: Any, deadline_s: float | None, **kwargs: Any) -> Any:  # noqa: ANN401
        import ray.exceptions

        where = f"{self.name}.{method}"
        try:
            with anyio.fail_after(deadline_s):
                return await getattr(self._actor, method).remote(*args, **kwargs)
        except TimeoutError as error:
            raise WorkerTimeout(
                f"{where} did not answer within {deadline_s:g} s; if the machine is only slow, raise the deadline"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            raise WorkerError(f"{where} failed: {type(cause).__name__}: {cause}") from error
        except ray.exceptions.RayActorError as error:
            raise WorkerDied(f"{self.name} died while {method} was running or before: {_first_line(error)}") from error

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
        environment: set in this process before Ray starts, so that every worker of a private cluster inherits it
            without a per-worker runtime environment (which costs start-up time).
        """
        self._spec = spec
        self._environment = dict(environment)
        self._workers: list[RayWorker] = []
        self._temp_dir: Path | None = None

    async def __aenter__(self) -> Cluster:
        os.environ.update(self._environment)
        os.environ.update({name: os.environ.get(name, value) for name, value in _ray_environment().items()})
        import ray  # reads RAY_AUTH_MODE while it is imported

        if ray.is_initialized():
            raise RuntimeError("Ray already runs in this process; leave its block before starting another cluster")

        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": False}
        if self._spec.address is not None:
            options["address"] = self._spec.address
        else:
            # Short: Ray's socket paths below it must stay under 108 characters.
            self._temp_dir = Path(tempfile.mkdtemp(prefix=f"asyncrl-ray-{os.getuid()}-", dir="/tmp"))
            options.update(
                num_cpus=0,  # no worker asks for one, and Ray starts an idle process for each
                num_gpus=0 if not _has_gpu() else None,
                resources={DEVICE_RESOURCE: self._spec.num_devices},
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._temp_dir),
                _node_ip_address="127.0.0.1",
            )
        try:
            ray.init(**options)  # in the main thread: Ray sets a signal handler
        except BaseException:
            self._remove_temp_dir()
            raise

        return self

    async def __aexit__(self, *_: object) -> None:
        import ray

        with anyio.CancelScope(shield=True):
            for worker in self._workers:
                worker.kill()
            await anyio.to_thread.run_sync(ray.shutdown)
            self._remove_temp_dir()

    async def place(self, spec: WorkerSpec) -> RayWorker:
        """Start a worker and wait until its process is up (its `__init__` has run).

        Raises:
            PlacementError: no room, or not within the placement deadline; names what is wanted and what is there.
            WorkerDied: the process ended while starting.
            WorkerError: `__init__` raised.
        """
        import ray
        import ray.exceptions

        wanted = {DEVICE_RESOURCE: float(spec.num_devices)}
        total = _resources()[0]
        if total < spec.num_devices:
            raise PlacementError(self._no_room(spec, wanted))

        options: dict[str, Any] = {"num_cpus": 0, "resources": wanted, "max_restarts": 0}
        if _has_gpu():
            options["num_gpus"] = spec.num_devices
        if spec.environment:
            options["runtime_env"] = {"env_vars": dict(spec.environment)}
        worker = RayWorker(spec.name, ray.remote(spec.cls).options(**options).remote(*spec.args))
        self._workers.append(worker)
        try:
            await worker.call("__ray_ready__", deadline_s=self._spec.placement_deadline_s)
        except WorkerTimeout as error:
            raise PlacementError(self._no_room(spec, wanted)) from error

        return worker

    def _no_room(self, spec: WorkerSpec, wanted: Mapping[str, float]) -> str:
        total, free = _resources()
        return (
            f"no room for {spec.name} within {self._spec.placement_deadline_s:g} s: it wants "
            f"{wanted[DEVICE_RESOURCE]:g} device slot(s); the cluster has {total:g}, {free:g} of them free. "
            "Raise cluster.devices, or use fewer ranks or replicas"
        )

    def _remove_temp_dir(self) -> None:
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            self._temp_dir = None


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


def _ray_environment() -> dict[str, str]:
    """Ray's settings by environment; what the user has set wins."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default, without its warning
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the home folder
    }


def _has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, without importing torch."""
    return Path("/dev/nvidiactl").exists()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
