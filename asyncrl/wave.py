"""Wave: what the generators wrote for one step, before anyone has judged it."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.types import Prompt
from engine.types import FlipReport, GenerateResult, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What the delivery of one version cost.

    Attributes:
        version: the version that was delivered.
        prepare_ms: receiving and verifying on the slowest replica; requests ran meanwhile.
        flip_ms: the pause: copy, repack and the round trip, all replicas side by side.
        flips: one report a replica.
    """

    version: WeightVersion
    prepare_ms: float
    flip_ms: float
    flips: tuple[FlipReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """All samples of one step.

    Attributes:
        step: the step that will train on them.
        version: the weights that wrote them.
        prompts: in the run's order.
        results: one a replica that had a share, in prompt order: replica 0 wrote the first prompts.
        started_s, ended_s: on the scheduler's clock.
        publish: how `version` came to the generators.
    """

    step: int
    version: WeightVersion
    prompts: tuple[Prompt, ...]
    results: tuple[GenerateResult, ...]
    started_s: float
    ended_s: float
    publish: PublishReport
