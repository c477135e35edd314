"""A real replica: vLLM in an actor, weights over shared memory, against Hugging Face in this process.

One Ray for the module; one replica (untied output head, float32, prefix caching) for most tests, which leave it at a
version of their own. The model is small but awkward: grouped queries, a vocabulary that vLLM pads, and a
down-projection of 1,536 columns, for which the kernels round one row differently from many.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.families import canonical_layout, vllm_layout
from engine.generator import GeneratorInfo, GeneratorSpec, GeneratorWorker
from engine.plan import Plan, make_plan
from engine.segments import RunSegments
from engine.snapshot import SnapshotWriter
from engine.types import FlipReport, GenerateRequest, GenerateResult, Manifest, Sampling, WeightVersion
from engine.vllm_cpu import worker_environment
from engine.workers import Cluster, ClusterSpec, RayWorker, WorkerError, WorkerSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_SLOTS = 3
VOCABULARY = 61
END = 2
SAMPLING = Sampling(max_tokens=24, stop_token_ids=(END,))
GREEDY = replace(SAMPLING, temperature=0.0)
PROMPTS = tuple(tuple((7 * i + j * j) % (VOCABULARY - 3) + 3 for j in range(3 + 5 * i)) for i in range(8))
SEEDS = tuple(10**15 + i for i in range(8))


def make_model(seed: int, *, tied: bool) -> Qwen2ForCausalLM:
    """A small Qwen2 on which a change of weights shows: logits of some size."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        bos_token_id=1,
        eos_token_id=5,  # not the recipe's end token: the folder must not end a response
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "bias" in name or "norm" in name:
                param.add_(torch.randn(param.shape) * 0.1)
    return model


@dataclass
class Publication:
    """The training side of one run, with a Hugging Face model in the trainer's place."""

    folder: Path
    segments: RunSegments
    plan: Plan
    writer: SnapshotWriter
    model: Qwen2ForCausalLM

    @classmethod
    def of(cls, model: Qwen2ForCausalLM, folder: Path, *, dtype: str = "float32") -> Publication:
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        plan = make_plan(
            canonical_layout(config, dtype="float32"), vllm_layout(config, tp=1, dtype=dtype), bucket_bytes=100_000
        )
        segments = RunSegments.create(f"test-{os.getpid()}-{folder.name}")
        params = dict(model.named_parameters())
        return cls(folder, segments, plan, SnapshotWriter(plan, 0, params, segments.folder, NUM_SLOTS), model)

    def write(self, version: int) -> Manifest:
        """Publish what the model holds now."""
        slot = version % NUM_SLOTS
        digests = self.writer.write(version, 0, slot)
        return Manifest(
            epoch=0,
            version=WeightVersion(version),
            written_version=WeightVersion(version),
            plan_hash=self.plan.hash,
            slot=slot,
            digests=digests,
        )

    def close(self) -> None:
        self.writer.close()
        self.segments.close()


@dataclass
class Replica:
    """A generator actor and what it serves."""

    worker: RayWorker
    publication: Publication
    info: GeneratorInfo
    version: int = -1

    async def call(self, method: str, *args: Any) -> Any:  # noqa: ANN401 - as Worker.call
        return await self.worker.call(method, *args, deadline_s=60)

    async def publish(self) -> FlipReport:
        """Serve what the model holds now, as the next version."""
        manifest = self.publication.write(self.version + 1)
        await self.call("prepare", manifest)
        report: FlipReport = await self.call("flip", manifest)
        self.version += 1
        return report

    def request(
        self,
        prompts: Sequence[tuple[int, ...]] = PROMPTS,
        seeds: Sequence[int] = SEEDS,
        sampling: Sampling = SAMPLING,
        priority: int = 0,
    ) -> GenerateRequest:
        return GenerateRequest(
            version=WeightVersion(self.version),
            prompt_ids=tuple(prompts),
            seeds=tuple(seeds),
            sampling=sampling,
            priority=priority,
        )

    async def generate(self, *args: Any, **kwargs: Any) -> GenerateResult:  # noqa: ANN401 - request's
        result: GenerateResult = await self.call("generate", self.request(*args, **kwargs))
        return result

    async def start_generating(self, *args: Any, **kwargs: Any) -> asyncio.Future[GenerateResult]:  # noqa: ANN401 - request's
        """Return once the engine computes (Ray may start concurrent calls in any order)."""
        before = (await self.call("report")).busy_s
        running = asyncio.ensure_future(self.generate(*args, **kwargs))
        while (await self.call("report")).busy_s == before:
            assert not running.done()
        return running


@asynccontextmanager
async def serving(cluster: Cluster, publication: Publication, **spec: Any) -> AsyncIterator[Replica]:  # noqa: ANN401 - GeneratorSpec's
    """A replica that is attached and pumps."""
    name = f"generator-{publication.folder.name}"
    generator = GeneratorSpec(model_dir=str(publication.folder), max_model_len=300, name=name, cpus=(0,), **spec)
    worker = await cluster.place(WorkerSpec(name=name, cls=GeneratorWorker, args=(generator,)))
    replica = Replica(worker, publication, await worker.call("start", deadline_s=120))
    await replica.call("attach", publication.plan, str(publication.segments.folder), NUM_SLOTS)
    pump = asyncio.ensure_future(worker.call("run", deadline_s=None))
    try:
        yield replica
    finally:
        await replica.call("stop")
        await pump
        publication.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    environment = worker_environment(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)  # undone at the end: the cluster sets them in this process
        async with Cluster(ClusterSpec(address=None, num_devices=3), environment=environment) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    publication = Publication.of(make_model(0, tied=False), tmp_path_factory.mktemp("untied"))
    async with serving(cluster, publication, prefix_caching=True) as running:
        await running.publish()
        yield running


def split(result: GenerateResult) -> list[tuple[list[int], np.ndarray]]:
    """(tokens, logprobs) of every sample."""
    ends = np.cumsum(result.lengths)[:-1]
    return [
        (tokens.tolist(), logprobs)
        for tokens, logprobs in zip(np.split(result.token_ids, ends), np.split(result.logprobs, ends), strict=True)
    ]


def bits(result: GenerateResult) -> list[tuple[list[int], bytes]]:
    """Every sample as something that is equal only bit for bit."""
    return [(tokens, logprobs.tobytes()) for tokens, logprobs in split(result)]


@torch.no_grad()
def largest_difference(
    model: Qwen2ForCausalLM, result: GenerateResult, temperature: float, prompts: Sequence[tuple[int, ...]] = PROMPTS
) -> float:
    """Largest difference of a logprob to Hugging Face's for the same tokens."""
    largest = 0.0
    for prompt, (tokens, logprobs) in zip(prompts, split(result), strict=True):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        largest = max(largest, float(np.abs(expected.numpy() - logprobs).max()))
    return largest


async def one_by_one(replica: Replica) -> list[tuple[list[int], bytes]]:
    """The bits of every sample when it has the engine to itself."""
    alone: list[tuple[list[int], bytes]] = []
    for prompt, seed in zip(PROMPTS, SEEDS, strict=True):
        alone += bits(await replica.generate(prompts=[prompt], seeds=[seed]))
    return alone


@torch.no_grad()
def change(model: Qwen2ForCausalLM, seed: int, only: str = "") -> None:
    """Move the weights, all or those whose name contains `only`, far enough to show."""
    torch.manual_seed(seed)
    for name, param in model.named_parameters():
        if only in name:
            param.add_(torch.randn(param.shape) * param.std() * 0.3)


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


async def test_a_flip_changes_every_weight(replica: Replica) -> None:
    model = replica.publication.model
    before = await replica.generate()
    change(model, seed=1)
    assert largest_difference(model, before, 1.0) > 0.1
    report = await replica.publish()
    after = await replica.generate()
    assert largest_difference(model, after, 1.0) < 1e-5
    assert set(after.versions.tolist()) == {replica.version}
    assert report.num_bytes == replica.publication.plan.num_bytes
    assert report.copy_ms > 0
    assert report.repack_ms > 0


@pytest.mark.parametrize(
    "only", ["lm_head", "embed_tokens", "q_proj.bias", "v_proj.weight", "o_proj", "up_proj", "down_proj", "norm"]
)
async def test_a_flip_changes_each_kind_of_weight(replica: Replica, only: str) -> None:
    model = replica.publication.model
    before = await replica.generate()
    change(model, seed=2, only=only)
    assert largest_difference(model, before, 1.0) > 1e-3
    await replica.publish()
    assert largest_difference(model, await replica.generate(), 1.0) < 1e-5


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


async def test_a_version_that_is_not_live_is_refused(replica: Replica) -> None:
    wrong = replace(replica.request(), version=WeightVersion(replica.version + 1))
    message = f"VersionMismatch: generator-.* serves version {replica.version}, version {replica.version + 1} was"
    with pytest.raises(WorkerError, match=message):
        await replica.call("generate", wrong)


async def test_a_flip_is_refused_while_requests_run_and_prepare_is_not(replica: Replica) -> None:
    expected = await replica.generate(prompts=PROMPTS * 8, seeds=range(64))
    change(replica.publication.model, seed=3)
    manifest = replica.publication.write(replica.version + 1)
    running = await replica.start_generating(prompts=PROMPTS * 8, seeds=range(64))
    await replica.call("prepare", manifest)
    with pytest.raises(WorkerError, match=f"cannot flip to version {replica.version + 1}: .* are under way"):
        await replica.call("flip", manifest)
    assert not running.done()
    assert bits(await running) == bits(expected)

    await replica.call("flip", manifest)
    replica.version += 1
    assert largest_difference(replica.publication.model, await replica.generate(), 1.0) < 1e-5


async def test_no_stale_cache(replica: Replica) -> None:
    """A prompt whose blocks were cached under the old weights is computed anew under the new ones."""
    prompts = (PROMPTS[7] * 7)[:260], (PROMPTS[7] * 7)[:259]  # beginnings that fill two blocks of 128
    model = replica.publication.model
    for _ in range(2):
        before = await replica.generate(prompts=prompts, seeds=(1, 2))
        assert largest_difference(model, before, 1.0, prompts) < 1e-5
    change(model, seed=4, only="layers.0")
    await replica.publish()
    after = await replica.generate(prompts=prompts, seeds=(1, 2))
    assert largest_difference(model, after, 1.0, prompts) < 1e-5


async def test_a_bucket_that_changes_after_prepare_leaves_the_old_version_serving(replica: Replica) -> None:
    expected = await replica.generate()
    manifest = replica.publication.write(replica.version + 1)
    await replica.call("prepare", manifest)
    replica.publication.writer.write(replica.version + 99, 0, manifest.slot)
    with pytest.raises(WorkerError, match=f"WeightTransferError: version {replica.version + 1}, bucket 0"):
        await replica.call("flip", manifest)

    with pytest.raises(WorkerError, match="WeightTransferError"):
        await replica.call("prepare", manifest)

    assert bits(await replica.generate()) == bits(expected)
    await replica.publish()
    assert bits(await replica.generate()) == bits(expected)  # the same weights, one version on


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
    assert dict(replica.info.params) == dict(replica.publication.plan.target.params[0])


async def test_every_thread_keeps_to_the_replicas_cores(replica: Replica) -> None:
    process = psutil.Process(replica.info.pid)
    assert {tuple(os.sched_getaffinity(thread.id)) for thread in process.threads()} == {(0,)}
    report = await replica.call("report")
    assert report.pid == replica.info.pid
    assert replica.info.peak_memory_bytes <= report.peak_memory_bytes < 4 << 30


async def test_a_tied_head_follows_its_embedding(cluster: Cluster, tmp_path: Path) -> None:
    publication = Publication.of(make_model(5, tied=True), tmp_path / "tied")
    async with serving(cluster, publication) as tied:
        with pytest.raises(WorkerError, match="has no version yet, version -1 was asked for: flip first"):
            await tied.generate()

        for seed in (6, 7):
            change(publication.model, seed=seed, only="embed_tokens" if seed == 7 else "")
            await tied.publish()
            assert largest_difference(publication.model, await tied.generate(), 1.0) < 1e-5

        pending = await tied.start_generating(prompts=PROMPTS * 8, seeds=range(64))
        await tied.call("stop")
        with pytest.raises(WorkerError, match=r"it was stopped, with \d+ of 64 samples of version 1 under way"):
            await pending


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
