"""What a real replica generates, against Hugging Face. Most tests share one (untied head, float32, prefix caching)."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from generator_replica import (
    END,
    GREEDY,
    PROMPTS,
    SAMPLING,
    SEEDS,
    VOCABULARY,
    Publication,
    Replica,
    bits,
    change,
    largest_difference,
    make_model,
    one_by_one,
    serving,
    split,
)

from engine.workers import Cluster, WorkerError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_hugging_faces(replica: Replica, temperature: float) -> None:
    result = await replica.generate(sampling=replace(SAMPLING, temperature=temperature))
    assert result.lengths.sum() > 50
    assert largest_difference(replica.publication.model, result, temperature) < 1e-5


async def test_logprobs_are_hugging_faces_with_nucleus_and_top_k(replica: Replica) -> None:
    sampling = replace(SAMPLING, top_k=3)
    result = await replica.generate(sampling=sampling)
    assert largest_difference(replica.publication.model, result, 1.0) > 0.01  # of the three that are left
    nearly_all = await replica.generate(sampling=replace(SAMPLING, top_p=0.999999))
    assert largest_difference(replica.publication.model, nearly_all, 1.0) < 1e-4


async def test_greedy_takes_the_likeliest_token(replica: Replica) -> None:
    model = replica.publication.model
    result = await replica.generate(sampling=GREEDY, seeds=range(8))
    for prompt, (tokens, _) in zip(PROMPTS, split(result), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


async def test_only_the_recipes_tokens_end_a_response(replica: Replica) -> None:
    result = await replica.generate(seeds=range(8))
    for (tokens, _), reason in zip(split(result), result.finish_reasons, strict=True):
        assert (END in tokens) == (reason == "stop")
        assert END not in tokens[:-1]
        assert reason == "stop" or len(tokens) == SAMPLING.max_tokens
    longer = await replica.generate(prompts=PROMPTS * 8, seeds=range(64))
    folders_eos = 5
    assert any(folders_eos in tokens[:-1] for tokens, _ in split(longer))


async def test_same_seeds_same_bits_alone_and_in_any_company(replica: Replica) -> None:
    """A sample's tokens and logprobs depend on its prompt, its seed and the weights, on nothing else."""
    together = bits(await replica.generate())
    assert bits(await replica.generate()) == together
    assert bits(await replica.generate(prompts=PROMPTS[::-1], seeds=SEEDS[::-1]))[::-1] == together
    assert await one_by_one(replica) == together
    crowd = await replica.generate(prompts=PROMPTS + PROMPTS * 60, seeds=(*SEEDS, *range(480)))
    assert bits(crowd)[:8] == together
    other = bits(await replica.generate(seeds=[seed + 1 for seed in SEEDS]))
    assert all(sample not in together for sample in other)


async def test_evaluation_beside_training_does_not_change_trainings_bits(replica: Replica) -> None:
    expected = await replica.generate()
    sampled = replica.request(
        PROMPTS * 8, range(64), sampling=replace(SAMPLING, temperature=0.5, top_p=0.9), priority=1
    )
    greedy = replica.request(PROMPTS * 8, range(64), sampling=GREEDY, priority=1)
    alone = [await replica.call("generate", request) for request in (sampled, greedy)]
    training, *evaluations = await asyncio.gather(
        replica.generate(), replica.call("generate", sampled), replica.call("generate", greedy)
    )
    assert bits(training) == bits(expected)
    assert [bits(result) for result in evaluations] == [bits(result) for result in alone]


async def test_an_unservable_request_leaves_nothing_behind(replica: Replica) -> None:
    expected = await replica.generate()
    with pytest.raises(WorkerError, match=r"prompt 0 has 290 tokens and max_tokens is 24.*max_model_len 300"):
        await replica.generate(prompts=[(5,) * 290], seeds=[0])

    with pytest.raises(WorkerError, match="ValueError: prompt 1 has token ids from 5 to 61"):
        await replica.generate(prompts=[(5, 6), (5, VOCABULARY)], seeds=[0, 1])

    with pytest.raises(WorkerError, match="temperature must be in"):
        await replica.generate(sampling=replace(SAMPLING, temperature=9.0))

    assert bits(await replica.generate()) == bits(expected)


async def test_ctrl_c_is_the_drivers(replica: Replica) -> None:
    os.kill(replica.info.pid, signal.SIGINT)
    assert (await replica.generate()).lengths.sum() > 0


async def test_live_parameters_are_the_layouts(replica: Replica) -> None:
    assert replica.info.worker_pids == ()
    assert dict(replica.info.params[0]) == dict(replica.publication.plan.target.params[0])


async def test_every_thread_keeps_to_the_replicas_cores(replica: Replica) -> None:
    process = psutil.Process(replica.info.pid)
    assert {tuple(os.sched_getaffinity(thread.id)) for thread in process.threads()} == {(0,)}
    report = await replica.call("report")
    assert report.pid == replica.info.pid
    assert replica.info.peak_memory_bytes <= report.peak_memory_bytes < 4 << 30


async def test_bfloat16_has_the_same_bits_in_any_company_and_follows_a_flip(cluster: Cluster, tmp_path: Path) -> None:
    publication = Publication.of(make_model(8, tied=False), tmp_path / "bfloat16", dtype="bfloat16")
    async with serving(cluster, publication, dtype="bfloat16") as replica:
        await replica.publish()
        before = await replica.generate()
        change(publication.model, seed=9)
        await replica.publish()
        together = await replica.generate()
        rounded = copy.deepcopy(publication.model).bfloat16()
        assert largest_difference(rounded, together, 1.0) < 0.1 < 0.3 < largest_difference(rounded, before, 1.0)
        assert await one_by_one(replica) == bits(together)
