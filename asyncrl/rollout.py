"""Rollout: one step's prompts spread over the replicas, one derived seed a sample; also evaluation's generations."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.types import Prompt
from engine.seeds import Purpose, derive_seed
from engine.types import FlipReport, GenerateRequest, GenerateResult, Manifest, Sampling, WeightVersion
from engine.workers import Worker, call_all


class Rollout:
    """All generator replicas as the scheduler sees them (its `Generators`).

    A sample's tokens do not depend on the replica that serves it nor on the number of replicas: the seed is derived
    from the sample, and the engine's output does not depend on what else is in the batch.
    """

    def __init__(
        self,
        *,
        replicas: Sequence[Worker],
        run_seed: int,
        sampling: Sampling,
        samples_per_prompt: int,
        deadline_s: float,
        prepare_deadline_s: float,
        flip_deadline_s: float,
        stop_deadline_s: float,
    ) -> None:
        """Args:
        deadline_s: for one wave on one replica.
        prepare_deadline_s, flip_deadline_s: for one version on one replica.
        stop_deadline_s: for the end of a replica's engine.
        """
        self._replicas = tuple(replicas)
        self._run_seed = run_seed
        self._sampling = sampling
        self._samples_per_prompt = samples_per_prompt
        self._deadline_s = deadline_s
        self._prepare_deadline_s = prepare_deadline_s
        self._flip_deadline_s = flip_deadline_s
        self._stop_deadline_s = stop_deadline_s

    async def prepare(self, manifest: Manifest) -> float:
        """Have every replica receive and verify a version; requests go on meanwhile. Returns the slowest one's ms."""
        took_ms: tuple[float, ...] = await call_all(
            self._replicas, "prepare", manifest, deadline_s=self._prepare_deadline_s
        )
        return max(took_ms)

    async def flip(self, manifest: Manifest) -> tuple[FlipReport, ...]:
        """Have every replica serve a version that all have prepared."""
        return await call_all(self._replicas, "flip", manifest, deadline_s=self._flip_deadline_s)

    async def generate(
        self, *, step: int, version: WeightVersion, prompts: tuple[Prompt, ...]
    ) -> tuple[GenerateResult, ...]:
        """Write `samples_per_prompt` samples of every prompt; in prompt order: sample k of prompt p at p * n + k."""
        seeds = tuple(
            derive_seed(self._run_seed, Purpose.SAMPLE, prompt.uid, prompt.index, sample_index, 0)
            for prompt in prompts
            for sample_index in range(self._samples_per_prompt)
        )
        return await self._spread(prompts, seeds, self._samples_per_prompt, version, self._sampling, priority=0)

    async def evaluate(
        self, *, version: WeightVersion, prompts: tuple[Prompt, ...], samples_per_prompt: int, sampling: Sampling
    ) -> tuple[GenerateResult, ...]:
        """Like `generate`, behind training's requests and with evaluation's own seeds (the same for every version)."""
        seeds = tuple(
            derive_seed(self._run_seed, Purpose.EVALUATION, prompt.uid, sample_index)
            for prompt in prompts
            for sample_index in range(samples_per_prompt)
        )
        return await self._spread(prompts, seeds, samples_per_prompt, version, sampling, priority=1)

    async def watch(self) -> None:
        """Return after `stop`; raise as soon as a replica dies or its engine fails."""
        await call_all(self._replicas, "run", deadline_s=None, grace_s=0.0)

    async def stop(self) -> None:
        """Let `watch` return."""
        await call_all(self._replicas, "stop", deadline_s=self._stop_deadline_s)

    async def _spread(
        self,
        prompts: tuple[Prompt, ...],
        seeds: tuple[int, ...],
        samples_per_prompt: int,
        version: WeightVersion,
        sampling: Sampling,
        *,
        priority: int,
    ) -> tuple[GenerateResult, ...]:
        """Give every replica a contiguous share of the prompts, sizes differing by at most one."""
        num_replicas = len(self._replicas)
        bounds = [len(prompts) * i // num_replicas for i in range(num_replicas + 1)]
        workers: list[Worker] = []
        requests: list[tuple[GenerateRequest]] = []
        for worker, start, stop in zip(self._replicas, bounds[:-1], bounds[1:], strict=True):
            if start == stop:
                continue

            request = GenerateRequest(
                version=version,
                prompt_ids=tuple(p.token_ids for p in prompts[start:stop] for _ in range(samples_per_prompt)),
                seeds=seeds[start * samples_per_prompt : stop * samples_per_prompt],
                sampling=sampling,
                priority=priority,
            )
            workers.append(worker)
            requests.append((request,))
        results: tuple[GenerateResult, ...] = await call_all(
            workers, "generate", deadline_s=self._deadline_s, each=requests
        )
        return results
