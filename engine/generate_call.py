"""One `generate` call of a replica: what it asks for, the samples that have ended, and the columns that it returns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import anyio
import numpy as np

from engine.types import GenerateRequest, GenerateResult
from engine.vllm_engine import FinishedSample


class GeneratorError(RuntimeError):
    """A replica cannot do what it was asked; the message names the replica, the versions and the cure."""


class VersionMismatch(GeneratorError):
    """A request wants another weight version than the one that is live."""


class GenerateCall:
    """A call under way; samples end in any order and keep the request's.

    Attributes:
        request: what was asked for.
        request_ids: one a sample.
        num_open: samples that have not ended.
        busy_s: seconds that the engine has spent on it.
        ended: set when the last sample has ended, or the call has failed.
    """

    def __init__(self, request: GenerateRequest, request_ids: Iterable[str]) -> None:
        self.request = request
        self.request_ids = tuple(request_ids)
        self.num_open = len(self.request_ids)
        self.busy_s = 0.0
        self.ended = anyio.Event()
        self._samples: dict[str, FinishedSample] = {}
        self._error: GeneratorError | None = None

    def open_ids(self) -> list[str]:
        """Requests that have not ended."""
        return [name for name in self.request_ids if name not in self._samples]

    def put(self, sample: FinishedSample) -> None:
        """Take one sample that has ended."""
        assert sample.request_id not in self._samples, f"request {sample.request_id} ended twice"
        self._samples[sample.request_id] = sample
        self.num_open -= 1

    def fail(self, reason: str) -> None:
        """End the call: `result` raises."""
        self._error = GeneratorError(
            f"{reason}, with {self.num_open} of {len(self.request_ids)} samples of version {self.request.version} "
            "under way"
        )
        self.ended.set()

    def result(self) -> GenerateResult:
        """The samples as columns, in the request's order.

        Raises:
            GeneratorError: the call has failed, or a logprob is not finite.
        """
        if self._error is not None:
            raise self._error

        samples = [self._samples[name] for name in self.request_ids]
        lengths = np.fromiter((len(sample.token_ids) for sample in samples), np.int32, len(samples))
        total = int(lengths.sum())
        token_ids = itertools.chain.from_iterable(sample.token_ids for sample in samples)
        logprobs = np.fromiter(itertools.chain.from_iterable(sample.logprobs for sample in samples), np.float32, total)
        if not np.isfinite(logprobs).all():
            raise GeneratorError(
                f"version {self.request.version} gives logprobs that are not finite: its weights are broken"
            )

        return GenerateResult(
            token_ids=np.fromiter(token_ids, np.int32, total),
            logprobs=logprobs,
            versions=np.full(total, self.request.version, np.int32),
            lengths=lengths,
            finish_reasons=tuple(sample.finish_reason for sample in samples),
            busy_s=self.busy_s,
        )


def check_request(request: GenerateRequest, max_model_len: int, vocabulary_size: int) -> None:
    """Raise ValueError, with both values, for a request that the engine cannot serve."""
    if len(request.seeds) != len(request.prompt_ids):
        raise ValueError(f"{len(request.prompt_ids)} prompts but {len(request.seeds)} seeds: one seed a sample")

    max_tokens = request.sampling.max_tokens
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")

    for index, prompt in enumerate(request.prompt_ids):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")

        if not 0 <= min(prompt) <= max(prompt) < vocabulary_size:
            raise ValueError(
                f"prompt {index} has token ids from {min(prompt)} to {max(prompt)}; the model's are in "
                f"[0, {vocabulary_size}): was it tokenized for another model?"
            )

        if len(prompt) + max_tokens > max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and max_tokens is {max_tokens}: together more than "
                f"max_model_len {max_model_len}; shorten the prompt, or raise generator.max_model_len"
            )
