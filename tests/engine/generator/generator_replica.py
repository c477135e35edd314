"""A real replica (vLLM in an actor, weights over shared memory), and Hugging Face in this process to compare it with.

The model is small but awkward: grouped queries, a vocabulary that vLLM pads, and a down-projection of 1,536 columns,
for which the kernels round one row differently from many.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.families import canonical_layout, vllm_layout
from engine.generator import GeneratorInfo, GeneratorSpec, GeneratorWorker
from engine.plan import Plan, make_plan
from engine.segments import RunSegments, SegmentMap
from engine.snapshot import SnapshotWriter
from engine.types import FlipReport, GenerateRequest, GenerateResult, Manifest, Sampling, WeightVersion
from engine.workers import Cluster, RayWorker, WorkerSpec

NUM_SLOTS = 3
VOCABULARY = 61
END = 2
SAMPLING = Sampling(max_tokens=24, stop_token_ids=(END,))
GREEDY = replace(SAMPLING, temperature=0.0)
PROMPTS = tuple(tuple((7 * i + j * j) % (VOCABULARY - 3) + 3 for j in range(3 + 5 * i)) for i in range(8))
SEEDS = tuple(10**15 + i for i in range(8))


def make_model(seed: int, *, tied: bool, heads: int = 2, kv_heads: int = 1) -> Qwen2ForCausalLM:
    """A small Qwen2 on which a change of weights shows: logits of some size."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32 * heads,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
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
    def of(cls, model: Qwen2ForCausalLM, folder: Path, *, dtype: str = "float32", tp: int = 1) -> Publication:
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        plan = make_plan(
            canonical_layout(config, dtype="float32"), vllm_layout(config, tp=tp, dtype=dtype), bucket_bytes=100_000
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

    def tamper(self, bucket_id: int, slot: int, *, header: bool) -> None:
        """Flip a bit of a bucket: of its header's version, or the payload's last byte."""
        segment = SegmentMap.of(self.plan, 0, NUM_SLOTS)
        place = segment.header(bucket_id, slot) + 40 if header else segment.payload(bucket_id, slot).stop - 1
        with (self.segments.folder / segment.file_name).open("r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    def close(self) -> None:
        self.writer.close()
        self.segments.close()


@dataclass
class Replica:
    """A generator actor and what it serves."""

    worker: RayWorker
    publication: Publication
    info: GeneratorInfo
    pump: asyncio.Future[None]
    version: int = -1
    dies: bool = False  # the test ends it, and looks at its pump

    async def call(self, method: str, *args: Any) -> Any:  # noqa: ANN401 - as Worker.call
        return await self.worker.call(method, *args, deadline_s=60)

    def start(self, method: str, *args: Any) -> asyncio.Future[Any]:  # noqa: ANN401 - as Worker.call
        """Like `call`, without waiting for the answer."""
        return asyncio.ensure_future(self.call(method, *args))

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
    generator = GeneratorSpec(
        **{"model_dir": str(publication.folder), "max_model_len": 300, "name": name, "cpus": (0,)} | spec
    )
    worker = await cluster.place(
        WorkerSpec(name=name, cls=GeneratorWorker, args=(generator,), num_devices=generator.tp)
    )
    info = await worker.call("start", deadline_s=120)
    await worker.call("attach", publication.plan, str(publication.segments.folder), NUM_SLOTS, deadline_s=60)
    replica = Replica(worker, publication, info, asyncio.ensure_future(worker.call("run", deadline_s=None)))
    try:
        yield replica
    finally:
        if not replica.dies:
            await replica.call("stop")
            await replica.pump
        worker.kill()
        publication.close()


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
