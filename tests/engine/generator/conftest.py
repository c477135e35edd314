"""One Ray for a module of tests with real replicas; what tests over fakes need of pytest's process."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from generator_replica import Publication, Replica, make_model, serving

from engine.vllm_cpu import worker_environment
from engine.workers import Cluster, ClusterSpec


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def this_process_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker ignores Ctrl-C and freezes its garbage; here it runs in pytest's process."""
    monkeypatch.setattr("engine.generator._freeze_garbage", lambda: None)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    environment = worker_environment(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)  # undone at the end: the cluster sets them in this process
        async with Cluster(ClusterSpec(address=None, num_devices=6), environment=environment) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    publication = Publication.of(make_model(0, tied=False), tmp_path_factory.mktemp("untied"))
    async with serving(cluster, publication, prefix_caching=True) as running:
        await running.publish()
        yield running
