"""Workers in real Ray: calls have a deadline and a name, and whatever goes wrong says which worker it was.

One private Ray for the module, with three device slots; every test leaves it without workers of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import pytest_asyncio

from engine.ray_settings import temp_root
from engine.workers import (
    Cluster,
    ClusterSpec,
    PlacementError,
    RayWorker,
    WorkerDied,
    WorkerError,
    WorkerSpec,
    WorkerTimeout,
    call_all,
)

NUM_SLOTS = 3
LONG_S = 60.0

in_cluster = pytest.mark.asyncio(loop_scope="module")


class Unpicklable(Exception):
    """Cannot be rebuilt from its text alone."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} is not {second}")


class Plain:
    """A worker that answers one call after the other."""

    def add(self, own: int, common: int = 0) -> int:
        return own + common

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def wait(self) -> None:
        threading.Event().wait()

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def fail(self, after_s: float = 0.0) -> None:
        time.sleep(after_s)
        raise LookupError("there is no such thing")

    def time_out(self) -> None:
        raise TimeoutError("the worker's own")

    def fail_unpicklable(self) -> None:
        raise Unpicklable(1, 2)

    def die(self, after_s: float = 0.0) -> None:
        time.sleep(after_s)
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Interleaved:
    """A worker that answers several calls at a time."""

    def __init__(self) -> None:
        self._opened = anyio.Event()

    async def wait(self) -> str:
        await self._opened.wait()
        return "opened"

    async def open(self) -> None:
        self._opened.set()


class Stillborn:
    """A worker that does not come up."""

    def __init__(self) -> None:
        raise ValueError("not today")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    handler = signal.getsignal(signal.SIGTERM)
    spec = ClusterSpec(address=None, num_devices=NUM_SLOTS)
    async with Cluster(spec, environment={"ASYNCRL_TEST_WORKERS": "inherited"}) as running:
        assert signal.getsignal(signal.SIGTERM) is handler, "what SIGTERM does is not Ray's business"
        assert "ASYNCRL_TEST_WORKERS" not in os.environ, "the workers' environment is not the driver's"
        from ray import cloudpickle  # not earlier: Ray reads its settings while it is imported

        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file
        yield running
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


Place = Callable[..., Awaitable[RayWorker]]


@pytest_asyncio.fixture(loop_scope="module")
async def place(cluster: Cluster) -> AsyncIterator[Place]:
    """`await place("name", Class)`; the workers end with the test."""
    placed: list[RayWorker] = []

    async def start(name: str, cls: type = Plain, **fields: Any) -> RayWorker:  # noqa: ANN401
        placed.append(await cluster.place(WorkerSpec(name=name, cls=cls, **fields)))
        return placed[-1]

    yield start
    for worker in placed:
        worker.kill()


@in_cluster
async def test_a_worker_answers_in_a_process_of_its_own(place: Place) -> None:
    worker = await place("w", environment={"ASYNCRL_TEST_OWN": "own"})
    assert await worker.call("add", 2, common=3, deadline_s=LONG_S) == 5
    assert await worker.call("pid", deadline_s=LONG_S) != os.getpid()
    assert await worker.call("variable", "ASYNCRL_TEST_WORKERS", deadline_s=LONG_S) == "inherited"
    assert await worker.call("variable", "ASYNCRL_TEST_OWN", deadline_s=LONG_S) == "own"


@in_cluster
async def test_async_methods_interleave(place: Place) -> None:
    worker = await place("w", Interleaved)
    answers: list[str] = []

    async def wait() -> None:
        answers.append(await worker.call("wait", deadline_s=LONG_S))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await worker.call("open", deadline_s=LONG_S)
    assert answers == ["opened"]


@in_cluster
async def test_a_late_answer_names_worker_and_method(place: Place) -> None:
    worker = await place("generator_7")
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"generator_7\.sleep did not answer within 0\.2 s; if it is only slow"):
        await worker.call("sleep", 30, deadline_s=0.2)
    assert time.monotonic() - started < 10


@in_cluster
async def test_an_error_names_worker_method_and_cause(place: Place) -> None:
    worker = await place("trainer_3")
    with pytest.raises(WorkerError, match=r"^trainer_3\.fail failed: LookupError: there is no such thing$") as caught:
        await worker.call("fail", deadline_s=LONG_S)
    assert 'raise LookupError("there is no such thing")' in str(caught.value.__cause__)
    with pytest.raises(WorkerError, match=r"^trainer_3\.fail_unpicklable failed: .*Unpicklable: 1 is not 2$"):
        await worker.call("fail_unpicklable", deadline_s=LONG_S)


@in_cluster
async def test_the_workers_own_timeout_is_an_error_and_not_ours(place: Place) -> None:
    worker = await place("w")
    with pytest.raises(WorkerError, match=r"^w\.time_out failed: TimeoutError: the worker's own$"):
        await worker.call("time_out", deadline_s=LONG_S)


@in_cluster
async def test_a_death_names_worker_method_process_and_last_words(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = await place("generator_0")
    pid = await worker.call("pid", deadline_s=LONG_S)
    with pytest.raises(WorkerDied) as caught:
        await worker.call("die", deadline_s=LONG_S)
    first, *words = str(caught.value).splitlines()
    assert first == (
        f"generator_0 (process {pid}) died while die was running or before: its process is gone (killed, out of "
        "memory, or crashed). Its last words:"
    )
    assert words == ["the last words"]
    with pytest.raises(WorkerDied, match=rf"^generator_0 \(process {pid}\) died while add was running or before"):
        await worker.call("add", 1, deadline_s=LONG_S)
    await anyio.sleep(2)  # Ray's own message comes a moment later
    assert capfd.readouterr() == ("", "")


@in_cluster
async def test_a_call_beside_the_others_shows_a_death_while_nothing_else_runs(place: Place) -> None:
    worker = await place("trainer_1", beside=("wait",))
    deaths: list[str] = []

    async def watch() -> None:
        try:
            await worker.call("wait", deadline_s=LONG_S)
        except WorkerDied as death:
            deaths.append(str(death))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await anyio.sleep(0.1)
        assert await worker.call("add", 2, 3, deadline_s=LONG_S) == 5, "the others are answered meanwhile"
        os.kill(await worker.call("pid", deadline_s=LONG_S), signal.SIGKILL)
    assert len(deaths) == 1
    assert re.match(r"trainer_1 \(process \d+\) died: its process is gone", deaths[0])


@in_cluster
async def test_a_worker_that_does_not_come_up_names_the_cause(place: Place) -> None:
    with pytest.raises(WorkerError, match=r"^trainer_1\.__init__ failed: ValueError: not today$"):
        await place("trainer_1", Stillborn)


@in_cluster
async def test_a_worker_that_never_fits_is_refused_at_once(place: Place) -> None:
    started = time.monotonic()
    with pytest.raises(
        PlacementError,
        match=r"^no room for generator_1: it wants 4 device slot\(s\); the cluster has 3, \d of them free\. "
        r"Raise cluster\.devices, or use fewer ranks or replicas$",
    ):
        await place("generator_1", num_devices=NUM_SLOTS + 1)
    assert time.monotonic() - started < 10


@in_cluster
async def test_a_worker_that_finds_no_room_in_time_is_refused(
    cluster: Cluster, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place("large", num_devices=NUM_SLOTS)
    monkeypatch.setattr(cluster, "_spec", replace(cluster._spec, placement_deadline_s=0.5))
    with pytest.raises(
        PlacementError,
        match=r"^generator_1 has no room, or did not come up, within 0\.5 s: it wants 1 device slot\(s\); the cluster "
        r"has 3, 0 of them free\. .* raise cluster\.placement_deadline_s$",
    ):
        await place("generator_1")


@in_cluster
async def test_call_all_answers_in_the_workers_order(place: Place) -> None:
    workers = [await place(f"w{index}") for index in range(3)]
    assert await call_all(workers, "add", 100, deadline_s=LONG_S, each=[(1,), (2,), (3,)]) == (101, 102, 103)
    assert await call_all([], "add", deadline_s=LONG_S) == ()


@in_cluster
async def test_call_all_waits_for_the_one_that_died(place: Place) -> None:
    """A rank whose peer died fails first, with an error about a connection: the message must name the dead one."""
    first, second = await place("trainer_0"), await place("trainer_1")

    class DiesSoon:
        """The second worker: whatever it is called for, it dies half a second later."""

        name = second.name

        async def call(self, method: str, *, deadline_s: float | None) -> Any:  # noqa: ANN401
            return await second.call("die", 0.5, deadline_s=deadline_s)

    with pytest.raises(WorkerDied, match=r"^trainer_1 \(process \d+\) died"):
        await call_all([first, DiesSoon()], "fail", deadline_s=LONG_S, grace_s=LONG_S)


@in_cluster
async def test_call_all_is_patient_for_its_grace_only(place: Place) -> None:
    workers = [await place("trainer_0"), await place("trainer_1")]
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"^trainer_0\.fail failed: LookupError"):
        await call_all(workers, "fail", deadline_s=LONG_S, each=[(0.0,), (30.0,)], grace_s=0.2)
    assert time.monotonic() - started < 10


@in_cluster
async def test_a_second_cluster_in_one_process_is_refused(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="Ray already runs in this process"):
        async with Cluster(ClusterSpec(address=None, num_devices=1), environment={}):
            pass


@in_cluster
async def test_rays_folder_is_private(cluster: Cluster) -> None:
    assert cluster._temp is not None
    assert cluster._temp.path.stat().st_mode & 0o777 == 0o700


def test_rays_files_go_where_the_user_wants_if_sockets_fit_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, root in {"/var/x": "/var/x", "/scratch/of/a/user/with/a/long/name": "/tmp"}.items():
        monkeypatch.setattr(tempfile, "tempdir", wanted)
        assert temp_root() == Path(root)


_JOIN = """
import sys

import anyio

from engine.workers import Cluster, ClusterError, ClusterSpec, PlacementError, WorkerSpec


class Plain:
    def variable(self, name):
        import os
        return os.environ.get(name)


async def main(address):
    async with Cluster(ClusterSpec(address=address, num_devices=8), environment={"FROM_DRIVER": "yes"}) as cluster:
        worker = await cluster.place(WorkerSpec(name="generator_0", cls=Plain))
        print(await worker.call("variable", "FROM_DRIVER", deadline_s=60))
        try:
            await cluster.place(WorkerSpec(name="trainer_0", cls=Plain, num_devices=2))
        except PlacementError as error:
            print(error)


try:
    anyio.run(main, sys.argv[1])
except ClusterError as error:
    print(error)
"""
_ALONE = """
import anyio, psutil

from engine.workers import Cluster, ClusterSpec, WorkerSpec


class Plain:
    pass


async def main():
    async with Cluster(ClusterSpec(address=None, num_devices=1), environment={}) as cluster:
        await cluster.place(WorkerSpec(name="w", cls=Plain))
        me = psutil.Process()
        for process in [me, *me.children(recursive=True)]:
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    print(connection.laddr.ip)


anyio.run(main)
"""


def without_ray_settings() -> dict[str, str]:
    """The environment without what this module's own cluster has set: that one binds loopback, another need not."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def run_script(script: str, *arguments: str, environment: dict[str, str]) -> str:
    """Run a driver of its own, which imports ray afresh, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments],
        env=without_ray_settings() | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_private_cluster_listens_on_loopback_only() -> None:
    addresses = set(run_script(_ALONE, environment={}).split())
    assert set() < addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.slow
def test_joins_a_cluster_by_its_address(tmp_path_factory: pytest.TempPathFactory) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
    folder = Path("/tmp", f"ajoin{os.getpid()}")  # short: Ray's sockets are below it
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    head = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("ray")),
            *("start", "--head", "--block", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"),
            *("--disable-usage-stats", f"--temp-dir={folder}", '--resources={"asyncrl_device": 1}'),
        ],
        env=without_ray_settings() | token,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert head.stdout is not None
        while "Ray runtime started" not in head.stdout.readline():
            assert head.poll() is None
        lines = run_script(_JOIN, f"127.0.0.1:{port}", environment=token).splitlines()
    finally:
        children = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.communicate()
        for process in psutil.wait_procs(children, timeout=10)[1]:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert lines == [
        "yes",
        "no room for trainer_0: it wants 2 device slot(s); the cluster has 1, 0 of them free. "
        """Give its nodes more, with `ray start --resources='{"asyncrl_device": 4}'`""",
    ]
    gone = run_script(_JOIN, f"127.0.0.1:{port}", environment=token)
    assert gone.startswith(f"cannot join the Ray cluster at 127.0.0.1:{port}: ")
