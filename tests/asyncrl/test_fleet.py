"""What each worker is told: every number of the recipe arrives where it belongs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from asyncrl.config import load_recipe
from asyncrl.fleet import FleetSpec, fleet_spec
from asyncrl.machine import Machine
from engine.generator import GeneratorSpec
from engine.seeds import Purpose, derive_seed
from trainers.types import LossSpec, OptimizerSpec, TrainerSpec

COPY = Path(__file__).parents[2] / "configs" / "grpo_copy.yaml"
MACHINE = Machine(cores=tuple(range(16)))
HF_CONFIG = {"model_type": "qwen2"}

EVERYTHING = """
seed=5
algorithm.clip_low=0.11 algorithm.clip_high=0.22 algorithm.entropy_coef=0.33
schedule.max_staleness=3
trainer.num_steps=200 trainer.tp=2 trainer.pp=2 trainer.dp=1 trainer.dtype=bfloat16 trainer.threads=2
trainer.optimizer.lr=0.004 trainer.optimizer.betas=[0.8,0.85] trainer.optimizer.eps=1e-7
trainer.optimizer.weight_decay=0.06 trainer.optimizer.grad_clip=0.7 trainer.optimizer.distributed=false
trainer.lr_schedule.warmup_steps=9 trainer.lr_schedule.decay=cosine trainer.lr_schedule.decay_share=0.25
trainer.lr_schedule.min_lr_ratio=0.125
generator.num_replicas=2 generator.dtype=bfloat16 generator.max_model_len=48 generator.max_new_tokens=12
generator.temperature=0.9 generator.max_num_seqs=17 generator.kv_cache_mb=33 generator.threads=3
publish.bucket_mb=0.5 publish.prepare_deadline_s=101 publish.flip_deadline_s=102 cluster.stop_deadline_s=106
cluster.devices=6 cluster.start_deadline_s=103 cluster.call_deadline_s=104
"""


def spec(*overrides: str, machine: Machine = MACHINE) -> FleetSpec:
    return fleet_spec(load_recipe(COPY, overrides, machine).recipe, machine, model_dir="model", hf_config=HF_CONFIG)


def test_every_number_arrives_where_it_belongs() -> None:
    made = spec(*EVERYTHING.split())
    assert made.trainer == TrainerSpec(
        model_dir="model",
        tp=2,
        pp=2,
        dp=1,
        dtype="bfloat16",
        optimizer=OptimizerSpec(
            lr=0.004,
            betas=(0.8, 0.85),
            eps=1e-7,
            weight_decay=0.06,
            clip_grad=0.7,
            distributed=False,
            schedule="cosine",
            warmup_steps=9,
            decay_start=150,
            decay_steps=200,
            min_lr_ratio=0.125,
        ),
        loss=LossSpec(clip_low=0.11, clip_high=0.22, entropy_coef=0.33, temperature=0.9),
        seed=5,
        cpus=((0, 1), (2, 3), (4, 5), (6, 7)),
        num_threads=2,
        collective_timeout_s=104,
    )
    assert made.generators == tuple(
        GeneratorSpec(
            name=f"generator_{replica}",
            model_dir="model",
            dtype="bfloat16",
            max_model_len=48,
            max_num_seqs=17,
            kv_cache_bytes=33 * 2**20,
            num_threads=3,
            tp=1,
            seed=derive_seed(5, Purpose.GENERATOR_RANK, replica) % 2**32,
            cpus=cpus,
        )
        for replica, cpus in enumerate([(8, 9, 10), (11, 12, 13)])
    )
    rest = {item.name: getattr(made, item.name) for item in dataclasses.fields(made)}
    del rest["trainer"], rest["generators"]
    assert rest == {
        "hf_config": HF_CONFIG,
        "bucket_bytes": 2**19,
        "num_slots": 5,
        "start_deadline_s": 103,
        "call_deadline_s": 104,
        "prepare_deadline_s": 101,
        "flip_deadline_s": 102,
        "stop_deadline_s": 106,
    }


def test_replicas_have_names_and_seeds_of_their_own() -> None:
    made = spec("generator.num_replicas=3", "cluster.devices=4")
    assert [generator.name for generator in made.generators] == ["generator_0", "generator_1", "generator_2"]
    seeds = [generator.seed for generator in made.generators]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**32 for seed in seeds), "numpy takes no more"


@pytest.mark.parametrize(
    ("overrides", "machine", "trainer", "generator"),
    [
        ((), Machine(cores=(4, 7)), ((4,),), (7,)),
        (("cluster.devices=2",), Machine(cores=(3,)), None, None),
        (("trainer.cpus=none",), Machine(cores=(0, 1)), None, (1,)),
        (("generator.cpus=none",), Machine(cores=(0, 1)), ((0,),), None),
        (("schedule.max_staleness=0",), Machine(cores=(0, 1)), ((0, 1),), (0, 1)),
        (("generator.tp=2", "cluster.devices=3"), Machine(cores=(0, 1, 2, 3)), ((0,),), (1, 2)),
        # Ranks that share a core wait for each other in vain: all cores, one each.
        (("generator.tp=2", "cluster.devices=3"), Machine(cores=(0, 1)), ((0,),), (0, 1)),
    ],
)
def test_who_is_pinned_where(
    overrides: tuple[str, ...],
    machine: Machine,
    trainer: tuple[tuple[int, ...], ...] | None,
    generator: tuple[int, ...] | None,
) -> None:
    made = spec(*overrides, machine=machine)
    assert made.trainer.cpus == trainer
    assert made.generators[0].cpus == generator


@pytest.mark.parametrize(("max_staleness", "num_slots"), [(0, 2), (1, 3), (4, 6)])
def test_the_store_holds_what_open_samples_need_and_the_one_being_written(max_staleness: int, num_slots: int) -> None:
    assert spec(f"schedule.max_staleness={max_staleness}").num_slots == num_slots


def test_without_a_decay_share_the_rate_decays_from_the_beginning() -> None:
    made = spec("trainer.lr_schedule.decay_share=1.0", "trainer.num_steps=70")
    assert (made.trainer.optimizer.decay_start, made.trainer.optimizer.decay_steps) == (0, 70)
