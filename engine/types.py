"""What crosses the generator's process border: requests, results, versions. Frozen, columnar, no objects per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

WeightVersion = NewType("WeightVersion", int)
"""Version v = the weights after v training steps. Only the publisher's commit makes a new one."""

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_p, top_k: nucleus and top-k cut; 1.0 and 0 switch them off.
        max_tokens: most tokens of one response, the end token included.
        stop_token_ids: a response that draws one of these ends with it (`finish_reason == "stop"`).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One batch of samples for one replica; it crosses the process border in one call.

    Attributes:
        version: the weights that must compute every token; another live version is an error, never a silent answer.
        prompt_ids: one prompt a sample, N of them (samples of one prompt share the tuple).
        seeds: one derived seed a sample, N of them.
        sampling: the same for all N.
        priority: 0 for training; evaluation uses 1 and waits behind it.

    Example: 64 prompts x 8 samples are N = 512 entries, sample k of prompt p at p * 8 + k.
    """

    version: WeightVersion
    prompt_ids: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """What a replica wrote for one `GenerateRequest`, in the request's order.

    Attributes:
        token_ids: int32 [total], responses one after the other, end token included.
        logprobs: float32 [total], processed logprobs (temperature applied) of exactly those tokens.
        versions: int32 [total], the weight version that computed each token.
        lengths: int32 [N], tokens of each response; `lengths.sum() == total`.
        finish_reasons: N of "stop" (end token drawn), "length" (cut at max_tokens) or "abort".
        busy_s: seconds that this replica spent on the batch, waiting excluded.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    lengths: IntArray
    finish_reasons: tuple[str, ...]
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Proof of one version: which buckets it consists of and what their bytes hash to.

    Attributes:
        epoch: rises when the trainer falls back to a checkpoint; a version is (epoch, version), compared whole.
        version: the version that the buckets hold.
        written_version: the version whose step wrote the bytes, as the buckets' headers say. Smaller than `version`
            after steps that made no new bits: such a step names its predecessor's bytes.
        plan_hash: the plan that cut them; both sides must hold the same one.
        slot: where in the store the bytes are.
        digests: bucket id -> xxh3_128 of its payload, for every bucket of the plan.
    """

    epoch: int
    version: WeightVersion
    written_version: WeightVersion
    plan_hash: str
    slot: int
    digests: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipReport:
    """What one flip to a new version cost on one generator rank, in milliseconds."""

    version: WeightVersion
    copy_ms: float
    repack_ms: float
    num_bytes: int
