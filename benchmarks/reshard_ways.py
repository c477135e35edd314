"""What one process of benchmarks/reshard.py does: the contenders, side by side on the same tensors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from reshard_case import Case

from engine.layout import Box, Layout, Shard
from engine.plan import Plan
from engine.publisher import Publisher
from engine.receiver import Receiver
from engine.seeds import Purpose, derive_seed
from engine.segments import RunSegments, store_bytes
from engine.snapshot import SnapshotWriter

Params = dict[str, torch.Tensor]
Step = tuple[str | None, Callable[[], None]]
"""A phase's name and its work; what has no name is not timed."""

_NUM_SLOTS = 2


class Way(Protocol):
    """One contender; a round runs its steps in order, all processes at once, with a barrier before each."""

    steps: tuple[Step, ...]

    def close(self) -> None: ...


class World:
    """What this process holds.

    Attributes:
        sources: parameters of its training rank; empty if it is none.
        targets: parameters of its inference rank; empty if it is none.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.is_source = rank < case.source.num_ranks
        self.is_target = rank < case.infer_tp * case.num_replicas
        self.target_rank = rank % case.infer_tp
        self.sources = _params(case.source, rank) if self.is_source else {}
        self.targets = _params(case.target, self.target_rank) if self.is_target else {}
        for shard in case.source.shards[rank] if self.is_source else ():  # every holder of a box has the same bits
            seed = derive_seed(0, Purpose.PARAMETER_INIT, shard.tensor, *shard.box.start)
            block = self.sources[shard.param][shard.param_slices]
            block.copy_(torch.randn(block.shape, generator=torch.Generator().manual_seed(seed)))


def _params(layout: Layout, rank: int) -> Params:
    return {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in layout.params[rank].items()
    }


class Asyncrl:
    """This engine, over shared memory."""

    def __init__(self, world: World) -> None:
        case = world.case
        self._world, self._version, self._slot = world, 0, 0
        self._digests: dict[int, str] = {}
        box: list[Any] = [None]
        if world.rank == 0:
            run_id = f"bench-{os.getpid()}"
            self._segments = RunSegments.create(run_id, num_bytes=store_bytes(case.plan, _NUM_SLOTS))
            box = [str(self._segments.folder)]
        dist.broadcast_object_list(box)
        folder = Path(box[0])
        self._writer = self._receiver = None
        if world.is_source:
            self._writer = SnapshotWriter(case.plan, world.rank, world.sources, folder, _NUM_SLOTS)
        if world.is_target:
            self._receiver = Receiver(case.plan, world.target_rank, world.targets, folder, _NUM_SLOTS)
        self._publisher = Publisher(case.plan.hash, case.plan.num_buckets, _NUM_SLOTS, ("all",))
        self.steps: tuple[Step, ...] = (
            (None, self._reserve),
            ("publish", self._publish),
            (None, self._commit),
            ("verify", self._verify),
            ("apply", self._apply),
            (None, self._retire),
        )

    def _reserve(self) -> None:
        self._slot = self._publisher.reserve(self._version)

    def _publish(self) -> None:
        if self._writer is not None:
            self._digests = self._writer.write(self._version, self._publisher.epoch, self._slot)

    def _commit(self) -> None:
        """The driver's part: digests become a manifest, a message of a few kilobytes."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self._digests)
        digests = {bucket: digest for each in gathered for bucket, digest in each.items()}
        self._manifest = self._publisher.commit(self._version, digests)
        self._publisher.hold("all", self._version)

    def _verify(self) -> None:
        if self._receiver is not None:
            self._receiver.prepare(self._manifest)

    def _apply(self) -> None:
        if self._receiver is not None:
            self._receiver.apply(self._manifest)

    def _retire(self) -> None:
        self._publisher.acknowledge("all", self._version)
        if self._version > 0:
            self._publisher.release("all", self._version - 1)
        self._publisher.retire_below(self._version)
        self._version += 1

    def close(self) -> None:
        """Unmap, then unlink."""
        if self._receiver is not None:
            self._receiver.close()
        dist.barrier()
        if self._writer is not None:
            self._writer.close()
        dist.barrier()
        if self._world.rank == 0:
            self._segments.close()


class Gather:
    """Every training rank gathers whole tensors, every inference rank cuts its part out: what loaders make of it.

    With `point_to_point` every holder sends to everybody; else gloo's all_gather within a pipeline stage, and a
    broadcast to the others.
    """

    def __init__(self, world: World, plan: Plan, targets: Params, target_rank: int, *, point_to_point: bool) -> None:
        size = world.case.source.num_ranks // world.case.train["pp"]
        self._world, self._point_to_point = world, point_to_point
        self._stages = [tuple(range(stage * size, (stage + 1) * size)) for stage in range(world.case.train["pp"])]
        self._replicated = {
            (stage, name)
            for stage, ranks in enumerate(self._stages)
            for name in world.case.source.params[ranks[0]]
            if len({_boxes(world.case.source, rank, name) for rank in ranks}) == 1
        }
        everybody = range(dist.get_world_size())
        self._groups = [dist.new_group(list(stage)) for stage in self._stages]
        self._others = [dist.new_group([stage[0], *(r for r in everybody if r not in stage)]) for stage in self._stages]
        self._cuts: dict[tuple[int, str], list[tuple[int, tuple[slice | int, ...], torch.Tensor]]] = {}
        for bucket in plan.buckets_of_target(target_rank) if targets else ():
            for copy in bucket.copies:
                source = Shard(copy.tensor, copy.box, copy.source_param, copy.source_start)
                block = Shard(copy.tensor, copy.box, copy.target_param, copy.target_start)
                target = targets[block.param][block.param_slices]
                key = bucket.source_rank // size, copy.source_param
                self._cuts.setdefault(key, []).append((bucket.source_rank, source.param_slices, target))
        self.steps: tuple[Step, ...] = (("gather and cut", self._run),)

    @torch.no_grad()
    def _run(self) -> None:
        for stage, ranks in enumerate(self._stages):
            for name, spec in sorted(self._world.case.source.params[ranks[0]].items()):
                holders = ranks[:1] if (stage, name) in self._replicated else ranks
                whole = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for _ in holders]
                if len(holders) == 1 and self._world.rank in ranks:
                    whole = [self._world.sources[name]]
                if self._point_to_point:
                    self._exchange(whole, holders, ranks, name)
                else:
                    self._collect(whole, stage, name)
                for source_rank, slices, target in self._cuts.get((stage, name), ()):
                    target.copy_(whole[(source_rank - ranks[0]) % len(holders)][slices])

    def _collect(self, whole: list[torch.Tensor], stage: int, name: str) -> None:
        ranks = self._stages[stage]
        if self._world.rank in ranks and len(whole) > 1:
            dist.all_gather(whole, self._world.sources[name], group=self._groups[stage])
        if len(ranks) < dist.get_world_size() and (self._world.rank == ranks[0] or self._world.rank not in ranks):
            for part in whole:
                dist.broadcast(part, ranks[0], group=self._others[stage])

    def _exchange(self, whole: list[torch.Tensor], holders: tuple[int, ...], ranks: tuple[int, ...], name: str) -> None:
        have = ranks if len(holders) == 1 else ()  # whoever holds the whole already
        work = []
        for part, source in zip(whole, holders, strict=True):
            if source == self._world.rank:
                part.copy_(self._world.sources[name])
                peers = (peer for peer in range(dist.get_world_size()) if peer != source and peer not in have)
                work += [dist.isend(self._world.sources[name], peer) for peer in peers]
            elif self._world.rank not in have:
                work.append(dist.irecv(part, source))
        for each in work:
            assert each is not None
            each.wait()

    def close(self) -> None:
        """Nothing is held."""


def _boxes(layout: Layout, rank: int, name: str) -> frozenset[tuple[str, Box]]:
    return frozenset((shard.tensor, shard.box) for shard in layout.shards[rank] if shard.param == name)


class Memcpy:
    """As many bytes as the inference rank needs, from the process's own memory."""

    def __init__(self, world: World) -> None:
        self._targets = [torch.empty_like(param) for param in world.targets.values()]
        self._sources = [param.clone() for param in world.targets.values()]
        self.steps: tuple[Step, ...] = (("copy", self._run),)

    @torch.no_grad()
    def _run(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)

    def close(self) -> None:
        """Nothing is held."""


def process_main(rank: int, case: Case, num_rounds: int, names: tuple[str, ...], port: int, answers: str) -> None:
    """Run all rounds of one case in one process; rank 0 writes the slowest process's seconds."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=case.num_processes,
        timeout=timedelta(seconds=120),
    )
    world = World(case, rank)
    ways = {name: make_way(name, world) for name in names}
    rounds = []
    for index in range(num_rounds):
        order = names if index % 2 == 0 else names[::-1]
        taken = {name: _timed(ways[name]) for name in order}
        rounds.append({name: taken[name] for name in names})
        if index == 0:
            check_same_bits(world, ways)
    for way in ways.values():
        way.close()
    if rank == 0:
        Path(answers).write_text(json.dumps(rounds))
    dist.barrier()
    dist.destroy_process_group()


def make_way(name: str, world: World) -> Way:
    """Return the contender of that name, over the world's tensors."""
    if name == "asyncrl":
        return Asyncrl(world)

    if name == "memcpy":
        return Memcpy(world)

    if name == "megatron":
        from reshard_megatron import Megatron

        return Megatron(world)

    if name == "vllm":
        from reshard_vllm import Vllm

        return Vllm(world)

    assert name in ("gather", "gather, p2p"), name
    return Gather(world, world.case.plan, world.targets, world.target_rank, point_to_point=name == "gather, p2p")


def _timed(way: Way) -> dict[str, float]:
    taken: dict[str, float] = {}
    for name, work in way.steps:
        dist.barrier()
        started = time.perf_counter()
        work()
        if name is not None:
            slowest = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            taken[name] = slowest.item()
    return taken


def check_same_bits(world: World, ways: Mapping[str, Way]) -> None:
    """Every way that fills the world's parameters fills them with the same bits, from zeros."""
    found = {}
    for name in [name for name in ("asyncrl", "gather", "gather, p2p") if name in ways]:
        for param in world.targets.values():
            param.zero_()
        _timed(ways[name])
        found[name] = {key: param.clone() for key, param in world.targets.items()}
    for name, params in found.items():
        for key, param in params.items():
            assert torch.equal(param.view(torch.int16), found["asyncrl"][key].view(torch.int16)), (name, key)
            assert param.any(), f"{name} left {key} empty"
