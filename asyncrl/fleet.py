"""Fleet: the worker processes of a run and the shared memory between them, from placement to the first version."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from asyncrl.machine import Machine, assign_cores
from asyncrl.schema import Recipe
from engine.families import megatron_layout, vllm_layout
from engine.generator import GeneratorSpec, GeneratorWorker
from engine.plan import Plan, make_plan
from engine.publisher import Publisher
from engine.seeds import Purpose, derive_seed
from engine.segments import RunSegments, store_bytes
from engine.types import FlipReport, Manifest, WeightVersion
from engine.vllm_cpu import worker_environment
from engine.workers import Cluster, ClusterSpec, RayWorker, Worker, WorkerSpec, call_all
from trainers.base import Trainer
from trainers.megatron import MegatronRank
from trainers.megatron_group import MegatronTrainer
from trainers.types import LossSpec, OptimizerSpec, TrainerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """What to place.

    Attributes:
        hf_config: of the model, a parsed config.json.
        trainer: the same for all training ranks.
        generators: one a replica.
        bucket_bytes, num_slots: of the weight store.
        start_deadline_s, call_deadline_s, prepare_deadline_s, flip_deadline_s, stop_deadline_s: of one call.
    """

    hf_config: Mapping[str, Any]
    trainer: TrainerSpec
    generators: tuple[GeneratorSpec, ...]
    bucket_bytes: int
    num_slots: int
    start_deadline_s: float
    call_deadline_s: float
    prepare_deadline_s: float
    flip_deadline_s: float
    stop_deadline_s: float


class Fleet:
    """All workers of a run, on a cluster that is up: `with Fleet(spec, cluster) as fleet`, `start`, `publish_first`.

    Leaving the block ends the workers and removes the shared memory, however it is left.

    Attributes:
        trainer: all training ranks.
        replicas: generator workers.
        plan: how the weights travel.
        publisher: the versions.
    """

    trainer: Trainer
    replicas: tuple[Worker, ...]
    publisher: Publisher

    def __init__(self, spec: FleetSpec, cluster: Cluster) -> None:
        self._spec = spec
        self._cluster = cluster
        self._placed: list[RayWorker] = []
        self.plan: Plan = make_plan(
            megatron_layout(
                spec.hf_config, tp=spec.trainer.tp, pp=spec.trainer.pp, dp=spec.trainer.dp, dtype=spec.trainer.dtype
            ),
            vllm_layout(spec.hf_config, tp=spec.generators[0].tp, dtype=spec.generators[0].dtype),
            bucket_bytes=spec.bucket_bytes,
        )

    @property
    def store_bytes(self) -> int:
        """Shared memory that holds versions, all slots."""
        return store_bytes(self.plan, self._spec.num_slots)

    def __enter__(self) -> Fleet:
        self._segments = RunSegments.create(secrets.token_hex(6), num_bytes=self.store_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for worker in self._placed:
                worker.kill()
        finally:
            self._segments.close()

    async def start(self, resume_from: str | None = None) -> None:
        """Start all workers side by side and connect them to the store.

        Args:
            resume_from: a folder that `Trainer.save` wrote; None starts from the model's own weights.

        Raises:
            PlacementError: no room.
            WorkerError, WorkerDied, WorkerTimeout: a worker did not start; names which.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._start_trainer, resume_from)
            tasks.start_soon(self._start_generators)
        self.publisher = Publisher(
            self.plan.hash, self.plan.num_buckets, self._spec.num_slots, tuple(r.name for r in self.replicas)
        )

    async def publish_first(self, version: WeightVersion) -> tuple[Manifest, tuple[FlipReport, ...]]:
        """Deliver the weights as they are, so that every generator holds them through the plan from the start."""
        slot = self.publisher.reserve(version)
        digests = await self.trainer.snapshot(version, epoch=self.publisher.epoch, slot=slot)
        manifest = self.publisher.commit(version, digests)
        await call_all(self.replicas, "prepare", manifest, deadline_s=self._spec.prepare_deadline_s)
        flips = await call_all(self.replicas, "flip", manifest, deadline_s=self._spec.flip_deadline_s)
        return manifest, flips

    async def generator_peaks(self) -> dict[str, int]:
        """Most resident memory of every replica so far, in bytes."""
        reports = await call_all(self.replicas, "report", deadline_s=self._spec.call_deadline_s)
        return {worker.name: report.peak_memory_bytes for worker, report in zip(self.replicas, reports, strict=True)}

    async def _start_trainer(self, resume_from: str | None) -> None:
        spec = self._spec.trainer
        ranks = await self._place(
            [
                WorkerSpec(name=f"trainer_{rank}", cls=MegatronRank, args=(spec, rank), beside=("watch",))
                for rank in range(spec.num_ranks)
            ]
        )
        trainer = MegatronTrainer(
            spec,
            ranks,
            start_deadline_s=self._spec.start_deadline_s,
            step_deadline_s=self._spec.call_deadline_s,
            disk_deadline_s=self._spec.call_deadline_s,
            stop_deadline_s=self._spec.stop_deadline_s,
        )
        await trainer.start()
        if resume_from is not None:
            await trainer.load(resume_from)
        await trainer.attach(self.plan, str(self._segments.folder), self._spec.num_slots)
        self.trainer = trainer

    async def _start_generators(self) -> None:
        replicas = await self._place(
            [
                WorkerSpec(name=spec.name, cls=GeneratorWorker, args=(spec,), num_devices=spec.tp)
                for spec in self._spec.generators
            ]
        )
        await call_all(replicas, "start", deadline_s=self._spec.start_deadline_s)
        folder = str(self._segments.folder)
        await call_all(
            replicas, "attach", self.plan, folder, self._spec.num_slots, deadline_s=self._spec.start_deadline_s
        )
        self.replicas = replicas

    async def _place(self, specs: list[WorkerSpec]) -> tuple[Worker, ...]:
        placed: dict[str, RayWorker] = {}

        async def place(spec: WorkerSpec) -> None:
            placed[spec.name] = await self._cluster.place(spec)
            self._placed.append(placed[spec.name])

        async with anyio.create_task_group() as tasks:
            for spec in specs:
                tasks.start_soon(place, spec)
        return tuple(placed[spec.name] for spec in specs)


def fleet_spec(recipe: Recipe, machine: Machine, *, model_dir: str, hf_config: Mapping[str, Any]) -> FleetSpec:
    """Take from the recipe what each worker needs."""
    cores = assign_cores(recipe, machine)
    trainer, generator, optimizer = recipe.trainer, recipe.generator, recipe.trainer.optimizer
    trainer_cpus = tuple(ids for ids in cores.trainer if ids is not None)
    return FleetSpec(
        hf_config=hf_config,
        trainer=TrainerSpec(
            model_dir=model_dir,
            tp=trainer.tp,
            pp=trainer.pp,
            dp=trainer.dp,
            dtype=trainer.dtype,
            optimizer=OptimizerSpec(
                lr=optimizer.lr,
                betas=optimizer.betas,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                clip_grad=optimizer.grad_clip,
                distributed=optimizer.distributed,
                schedule=trainer.lr_schedule.decay,
                warmup_steps=trainer.lr_schedule.warmup_steps,
                decay_start=round(trainer.num_steps * (1.0 - trainer.lr_schedule.decay_share)),
                decay_steps=trainer.num_steps,
                min_lr_ratio=trainer.lr_schedule.min_lr_ratio,
            ),
            loss=LossSpec(
                clip_low=recipe.algorithm.clip_low,
                clip_high=recipe.algorithm.clip_high,
                entropy_coef=recipe.algorithm.entropy_coef,
                temperature=generator.temperature,
            ),
            seed=recipe.seed,
            cpus=trainer_cpus if len(trainer_cpus) == trainer.world_size else None,
            num_threads=trainer.threads,
            collective_timeout_s=recipe.cluster.call_deadline_s,
        ),
        generators=tuple(
            GeneratorSpec(
                name=f"generator_{replica}",
                model_dir=model_dir,
                dtype=generator.dtype,
                max_model_len=generator.max_model_len,
                max_num_seqs=generator.max_num_seqs,
                kv_cache_bytes=generator.kv_cache_mb << 20 if generator.kv_cache_mb is not None else None,
                num_threads=generator.threads,
                tp=generator.tp,
                seed=derive_seed(recipe.seed, Purpose.GENERATOR_RANK, replica) % 2**32,  # numpy's takes 32 bits
                cpus=cores.generator[replica],
            )
            for replica in range(generator.num_replicas)
        ),
        bucket_bytes=recipe.publish.bucket_bytes,
        num_slots=recipe.schedule.num_slots,
        start_deadline_s=recipe.cluster.start_deadline_s,
        call_deadline_s=recipe.cluster.call_deadline_s,
        prepare_deadline_s=recipe.publish.prepare_deadline_s,
        flip_deadline_s=recipe.publish.flip_deadline_s,
        stop_deadline_s=recipe.cluster.stop_deadline_s,
    )


def cluster_for(recipe: Recipe, machine: Machine) -> Cluster:
    """The cluster that the recipe names or, without an address, a private one; not yet up."""
    devices, on_gpu = recipe.cluster.devices, machine.num_gpus > 0
    spec = ClusterSpec(
        address=recipe.cluster.address,
        num_devices=devices if devices != "auto" else machine.num_devices,
        on_gpu=on_gpu,
        placement_deadline_s=recipe.cluster.placement_deadline_s,
    )
    environment = worker_environment(recipe.generator.threads, device="cuda" if on_gpu else "cpu")
    return Cluster(spec, environment=environment)
