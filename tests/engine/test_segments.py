"""Shared memory: private to its user, unlinked by its creator only, swept when its run is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.families import megatron_layout, vllm_layout
from engine.plan import Plan, make_plan
from engine.segments import (
    BucketHeader,
    BucketState,
    RunSegments,
    SegmentMap,
    SegmentReader,
    SegmentWriter,
    WeightTransferError,
    store_bytes,
)
from engine.shared_folder import sweep

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def plan(make_config: Callable[..., Any]) -> Plan:
    config = make_config()
    return make_plan(megatron_layout(config, tp=1, pp=1, dp=2), vllm_layout(config, tp=1), bucket_bytes=4096)


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[RunSegments]:
    with RunSegments.create("test", root=tmp_path) as run:
        yield run


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start another process of this user that says one line when it is ready and then waits to be killed."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            script + "\nprint('ready', flush=True)\nimport time\ntime.sleep(600)",
            *map(str, arguments),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL: nothing of it gets a chance to clean up."""
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def modes(folder: Path) -> dict[str, int]:
    """Permission bits of the folder and what is in it."""
    return {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}


def test_folder_and_files_are_private(segments: RunSegments, plan: Plan, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        writer = SegmentWriter(plan, 0, segments.folder, 2)
        with RunSegments.create("other", root=tmp_path) as other:
            assert modes(other.folder) == {other.folder.name: 0o700, "run.lock": 0o600}
    finally:
        os.umask(old)
    assert segments.folder.name == f"asyncrl-{os.geteuid()}-test"
    assert modes(segments.folder) == {segments.folder.name: 0o700, "run.lock": 0o600, "source-00000.buckets": 0o600}
    writer.close()
    assert sorted(path.name for path in segments.folder.iterdir()) == ["run.lock"]
    writer.close()


def test_close_removes_what_dead_ranks_left(segments: RunSegments, plan: Plan) -> None:
    writer = SegmentWriter(plan, 0, segments.folder, 2)
    segments.close()
    assert not segments.folder.exists()
    segments.close()
    writer.close()


def test_a_file_is_created_once(segments: RunSegments, plan: Plan) -> None:
    writer = SegmentWriter(plan, 0, segments.folder, 2)
    with pytest.raises(WeightTransferError, match=r"source-00000.buckets exists: source rank 0 is already there"):
        SegmentWriter(plan, 0, segments.folder, 2)
    SegmentReader(plan, 0, segments.folder, 2).close()
    writer.close()


def test_links_are_not_followed(segments: RunSegments, plan: Plan, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (segments.folder / "source-00000.buckets").symlink_to(victim)
    with pytest.raises(WeightTransferError, match="exists"):
        SegmentWriter(plan, 0, segments.folder, 2)
    with pytest.raises(WeightTransferError, match="symbolic links"):
        SegmentReader(plan, 0, segments.folder, 2)

    linked = tmp_path / "linked"
    linked.symlink_to(segments.folder)
    with pytest.raises(WeightTransferError, match=r"linked: (Not a directory|Too many levels of symbolic links)"):
        SegmentWriter(plan, 1, linked, 2)
    assert victim.read_bytes() == b"precious"


def test_readers_and_writers_check_who_else_could_write(segments: RunSegments, plan: Plan) -> None:
    writer = SegmentWriter(plan, 0, segments.folder, 2)
    path = segments.folder / "source-00000.buckets"
    path.chmod(0o660)
    with pytest.raises(WeightTransferError, match="has mode 660, a private file has 600"):
        SegmentReader(plan, 0, segments.folder, 2)
    path.chmod(0o600)
    segments.folder.chmod(0o755)
    with pytest.raises(WeightTransferError, match="has mode 755, a private folder has 700"):
        SegmentReader(plan, 0, segments.folder, 2)
    with pytest.raises(WeightTransferError, match="has mode 755, a private folder has 700"):
        SegmentWriter(plan, 1, segments.folder, 2)
    segments.folder.chmod(0o700)
    writer.close()


def test_another_users_folder_is_refused(
    segments: RunSegments, plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(WeightTransferError, match=f"belongs to user {owner}, not to {owner + 1}"):
        SegmentWriter(plan, 0, segments.folder, 2)
    (tmp_path / f"asyncrl-{owner + 1}-forged").mkdir(mode=0o700)
    assert sweep(tmp_path) == []
    assert (tmp_path / f"asyncrl-{owner + 1}-forged").exists()


def test_what_is_missing_or_of_another_size_is_named(segments: RunSegments, plan: Plan) -> None:
    with pytest.raises(WeightTransferError, match=r"source-00000.buckets of source rank 0: No such file"):
        SegmentReader(plan, 0, segments.folder, 2)

    writer = SegmentWriter(plan, 0, segments.folder, 2)
    size = SegmentMap.of(plan, 0, 2).num_bytes
    with pytest.raises(WeightTransferError, match=f"has {size} bytes, the plan says {size // 2 * 3}"):
        SegmentReader(plan, 0, segments.folder, 3)

    reader = SegmentReader(plan, 0, segments.folder, 2)
    reader.check_size()
    os.truncate(segments.folder / "source-00000.buckets", 4096)
    with pytest.raises(WeightTransferError, match=f"was truncated to 4096 bytes, the plan says {size}"):
        reader.check_size()
    reader.close()
    reader.close()
    writer.close()


def test_a_header_says_what_is_behind_it(segments: RunSegments, plan: Plan) -> None:
    writer, reader = SegmentWriter(plan, 1, segments.folder, 2), None
    reader = SegmentReader(plan, 1, segments.folder, 2)
    bucket = plan.buckets_of_source(1)[-1]
    with pytest.raises(WeightTransferError, match=rf"bucket {bucket.id}, slot 1: no bucket header: magic b'\\x00"):
        reader.header(bucket.id, 1)

    writer.begin(bucket.id, 1, epoch=3, version=8)
    wanted = BucketHeader(BucketState.WRITING, plan.hash, 3, 8, bucket.id, bucket.num_bytes)
    assert reader.header(bucket.id, 1) == wanted
    writer.memory[writer.payload(bucket.id, 1)] = b"w" * bucket.num_bytes
    writer.seal(bucket.id, 1, epoch=3, version=8, digest="ab" * 16)
    assert reader.header(bucket.id, 1).state is BucketState.SEALED
    assert reader.header(bucket.id, 1).digest == "ab" * 16
    assert reader.memory[reader.payload(bucket.id, 1)] == b"w" * bucket.num_bytes
    reader.close()
    writer.close()


def test_headers_and_payloads_do_not_overlap(plan: Plan) -> None:
    for rank in (0, 1):
        segment = SegmentMap.of(plan, rank, 3)
        places = [
            (segment.header(bucket.id, slot), segment.payload(bucket.id, slot))
            for slot in range(3)
            for bucket in plan.buckets_of_source(rank)
        ]
        end = 0
        for header, payload in places:
            assert header >= end
            assert payload.start >= header + 88
            assert payload.start % 64 == 0
            end = payload.stop
        assert end <= segment.num_bytes
    assert store_bytes(plan, 3) >= 3 * plan.num_bytes


def test_space_is_checked_first(tmp_path: Path, segments: RunSegments, plan: Plan) -> None:
    info = os.statvfs(tmp_path)
    too_much = info.f_blocks * info.f_frsize * 2
    message = rf"{tmp_path} has [\d,]+ bytes free, the weight versions need {too_much:,}.*shm-size.*max_staleness"
    with pytest.raises(WeightTransferError, match=message):
        RunSegments.create("large", num_bytes=too_much, root=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [segments.folder.name]


def test_a_full_store_is_an_error_and_leaves_no_file(
    segments: RunSegments, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightTransferError, match=r"source-00000.buckets: no space for [\d,]+ bytes"):
        SegmentWriter(plan, 0, segments.folder, 2)
    assert not (segments.folder / "source-00000.buckets").exists()


@pytest.mark.parametrize("run_id", ["", ".", "../up", "a/b", "-x", "a" * 101, "a b"])
def test_a_run_id_is_a_file_name(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ValueError, match="is no file name"):
        RunSegments.create(run_id, root=tmp_path)


DRIVER = """
import sys
from pathlib import Path
from engine.segments import RunSegments
run = RunSegments.create(sys.argv[2], root=Path(sys.argv[1]))
(run.folder / "source-00000.buckets").write_bytes(b"left behind")
"""


def test_live_runs_are_left_alone_and_dead_ones_swept(tmp_path: Path) -> None:
    live = start(DRIVER, tmp_path, "live")
    dead = start(DRIVER, tmp_path, "dead")
    kill(dead)
    with pytest.raises(ValueError, match=r"asyncrl-\d+-live exists and could not be swept: run live is live"):
        RunSegments.create("live", root=tmp_path)
    prefix = f"asyncrl-{os.geteuid()}-"
    assert sorted(path.name for path in tmp_path.iterdir()) == [prefix + "live"]

    kill(live)
    (tmp_path / (prefix + "stillborn")).mkdir(mode=0o700)  # its driver died between mkdir and lock
    with RunSegments.create("live", root=tmp_path) as run:
        assert sorted(path.name for path in tmp_path.iterdir()) == [run.folder.name]
        assert sorted(path.name for path in run.folder.iterdir()) == ["run.lock"]
    assert list(tmp_path.iterdir()) == []


RECEIVER = """
import pickle, sys
from pathlib import Path
from engine.segments import SegmentReader
from engine.views import memory_tensor
plan = pickle.loads(bytes.fromhex(sys.argv[2]))
reader = SegmentReader(plan, 0, Path(sys.argv[1]), 2)
weights = memory_tensor(reader.memory)
assert int(weights[reader.payload(plan.buckets_of_source(0)[0].id, 0)][0]) == ord("w")
"""


def test_a_killed_receiver_takes_no_segment_with_it(segments: RunSegments, make_config: Callable[..., Any]) -> None:
    import pickle

    config = make_config(num_hidden_layers=1)
    plan = make_plan(megatron_layout(config, tp=1, pp=1, dp=1), vllm_layout(config, tp=1), bucket_bytes=1 << 20)
    writer = SegmentWriter(plan, 0, segments.folder, 2)
    bucket = plan.buckets[0]
    writer.memory[writer.payload(bucket.id, 0)] = b"w" * bucket.num_bytes
    kill(start(RECEIVER, segments.folder, pickle.dumps(plan).hex()))

    reader = SegmentReader(plan, 0, segments.folder, 2)
    assert reader.memory[reader.payload(bucket.id, 0)] == b"w" * bucket.num_bytes
    reader.close()
    writer.close()
