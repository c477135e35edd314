"""What a run reports, declared once: each field of a record carries its tracked name, unit and meaning.

`flatten` is the only conversion, so wandb, `metrics.jsonl` and the docs cannot disagree on a name.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

Number = int | float
Flat = dict[str, Number]
"""Tracked name -> value; what one record becomes. Example: {"train/step": 3, "train/loss": -0.012, ...}."""

STEP_AXIS = "train/step"
"""The x axis of every metric. A step record stands at its step; an evaluation of version v stands at v, because v is
the version that step v starts from."""

_BYTES_TO_GB = 1e-9
_BYTES_TO_MB = 1e-6


@dataclass(frozen=True, slots=True)
class Metric:
    """How one field is reported.

    Attributes:
        name: "group/name" as in wandb and metrics.jsonl. Contains "{process}" where the field is a mapping.
        unit: unit of the reported value.
        description: one line for the docs.
        factor: reported value = field * factor.
    """

    name: str
    unit: str
    description: str
    factor: float = 1.0


def _as(name: str, unit: str, description: str, factor: float = 1.0) -> dict[str, Metric]:
    return {"metric": Metric(name=name, unit=unit, description=description, factor=factor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one trained step reports. None means "not known in this step" and is left out of the flat form.

    Means over samples are None where the step had no sample, times of a publish where none was finished since the
    record before. Waits and idle shares cover the time since the record before.
    """

    step: int = field(metadata=_as(STEP_AXIS, "steps", "the step that was trained, counted from 0"))
    version: int = field(metadata=_as("train/version", "versions", "the weight version that the step made (step + 1)"))
    loss: float = field(metadata=_as("train/loss", "nats/token", "token mean of the policy loss"))
    grad_norm: float = field(metadata=_as("train/grad_norm", "", "global gradient norm before clipping"))
    lr: float = field(metadata=_as("train/lr", "", "learning rate that was used"))
    entropy: float = field(metadata=_as("train/entropy", "nats/token", "mean entropy of the policy"))
    clip_fraction: float = field(metadata=_as("train/clip_fraction", "share", "trained tokens whose ratio was clipped"))
    ratio_max: float = field(metadata=_as("train/ratio_max", "", "largest importance ratio of a trained token"))
    generator_kl: float = field(
        metadata=_as("train/generator_kl", "nats/token", "k3 estimate of the KL from generator to trainer")
    )
    num_tokens: int = field(metadata=_as("train/num_tokens", "tokens", "positions that went through the model"))
    num_loss_tokens: int = field(metadata=_as("train/num_loss_tokens", "tokens", "denominator of the token mean"))
    skipped: bool = field(metadata=_as("train/skipped", "0 or 1", "1 if no token had a gradient: same weights"))

    reward_mean: float | None = field(metadata=_as("rollout/reward_mean", "", "mean reward of the step's samples"))
    reward_std: float | None = field(metadata=_as("rollout/reward_std", "", "standard deviation of those rewards"))
    accuracy: float | None = field(metadata=_as("rollout/accuracy", "share", "samples whose answer counts as right"))
    response_length_mean: float | None = field(
        metadata=_as("rollout/response_length_mean", "tokens", "mean response length, end token included")
    )
    finished_share: float | None = field(
        metadata=_as("rollout/finished_share", "share", "responses that drew an end token (the others were cut)")
    )
    num_samples: int = field(metadata=_as("rollout/num_samples", "samples", "scored samples"))
    num_failures: int = field(metadata=_as("rollout/num_failures", "samples", "samples that ended without a score"))
    num_response_tokens: int = field(
        metadata=_as("rollout/num_response_tokens", "tokens", "tokens that were generated")
    )

    staleness: int | None = field(
        metadata=_as("schedule/staleness", "versions", "step minus the oldest version in its batch, when consumed")
    )
    step_s: float = field(metadata=_as("schedule/step_s", "s", "wall time since the step before ended"))
    generate_s: float = field(metadata=_as("schedule/generate_s", "s", "generators' busy time for the step's samples"))
    train_s: float = field(metadata=_as("schedule/train_s", "s", "the trainer's step, snapshot included"))
    trainer_wait_s: float = field(metadata=_as("schedule/trainer_wait_s", "s", "the trainer waited for a batch"))
    generator_wait_s: float = field(
        metadata=_as("schedule/generator_wait_s", "s", "generators waited to be admitted or to flip")
    )
    trainer_idle: float | None = field(metadata=_as("schedule/trainer_idle", "share", "time in which no step ran"))
    generator_idle: float | None = field(
        metadata=_as("schedule/generator_idle", "share", "time without a request in flight, mean over the replicas")
    )
    overlap: float | None = field(metadata=_as("schedule/overlap", "share", "time in which both sides were busy"))

    snapshot_ms: float | None = field(
        default=None, metadata=_as("publish/snapshot_ms", "ms", "slowest training rank writing the version's shards")
    )
    prepare_ms: float | None = field(
        default=None, metadata=_as("publish/prepare_ms", "ms", "slowest replica verifying coverage and digests")
    )
    flip_ms: float | None = field(
        default=None, metadata=_as("publish/flip_ms", "ms", "slowest replica applying the version (copy and repack)")
    )
    publish_bytes: int | None = field(
        default=None, metadata=_as("publish/moved_mb", "MB", "bytes that the replicas applied", _BYTES_TO_MB)
    )
    publish_memory_bytes: int | None = field(
        default=None,
        metadata=_as("publish/memory_mb", "MB", "shared memory that holds versions, all slots", _BYTES_TO_MB),
    )
    peak_memory_bytes: Mapping[str, int] = field(
        default_factory=dict,
        metadata=_as(
            "memory/{process}_gb", "GB", "peak resident memory of a process, for instance trainer_0", _BYTES_TO_GB
        ),
    )

    @property
    def tokens_per_s(self) -> float | None:
        """Response tokens per second of wall time; None for a step that took no time (a virtual clock)."""
        return self.num_response_tokens / self.step_s if self.step_s > 0 else None

    @property
    def publish_ms(self) -> float | None:
        """The three parts of a publish together, as far as they are known; None if none is."""
        parts = [part for part in (self.snapshot_ms, self.prepare_ms, self.flip_ms) if part is not None]
        return sum(parts) if parts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """What one held-out evaluation reports. An accuracy is None where the recipe does not draw that way."""

    version: int = field(metadata=_as("eval/version", "versions", "the weight version that was evaluated"))
    sampled_accuracy: float | None = field(
        metadata=_as("eval/sampled_accuracy", "share", "right answers, drawn at the recipe's temperature")
    )
    greedy_accuracy: float | None = field(
        metadata=_as("eval/greedy_accuracy", "share", "right answers, drawn greedily")
    )
    reward_mean: float | None = field(metadata=_as("eval/reward_mean", "", "mean reward of the sampled answers"))
    num_prompts: int = field(metadata=_as("eval/num_prompts", "prompts", "held-out prompts that were asked"))
    num_failures: int = field(
        metadata=_as("eval/num_failures", "samples", "answers without a score; they count as wrong")
    )
    eval_s: float = field(metadata=_as("eval/eval_s", "s", "from the first request to the last score"))

    @property
    def step(self) -> int:
        """Where the evaluation stands on the step axis."""
        return self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One rollout to look at. The texts are raw: whoever shows them escapes them (`asyncrl.escape`)."""

    step: int
    version: int
    prompt: str
    response: str
    answer: str
    reward: float
    correct: bool | None
    finish_reason: str


_DERIVED: Mapping[type, Mapping[str, Metric]] = {
    StepRecord: {
        "tokens_per_s": Metric("schedule/tokens_per_s", "tokens/s", "response tokens per second of wall time"),
        "publish_ms": Metric("publish/total_ms", "ms", "snapshot, prepare and flip together"),
    },
    EvalRecord: {"step": Metric(STEP_AXIS, "steps", "the step that was trained, counted from 0")},
}


def _table(record_type: type) -> tuple[tuple[str, Metric], ...]:
    declared = tuple((item.name, item.metadata["metric"]) for item in fields(record_type))
    return declared + tuple(_DERIVED[record_type].items())


_TABLES: Mapping[type, tuple[tuple[str, Metric], ...]] = {kind: _table(kind) for kind in (StepRecord, EvalRecord)}
METRICS: tuple[Metric, ...] = tuple(dict.fromkeys(metric for table in _TABLES.values() for _, metric in table))
"""Every metric of a run, in the order of the docs."""

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(metric.name.split("/")[0] for metric in METRICS))
"""The first halves of all names: train, rollout, schedule, publish, memory, eval."""


def flatten(record: StepRecord | EvalRecord) -> Flat:
    """Return the record under its tracked names, in reported units, plain Python numbers only; None is left out.

    Example: a step record with `peak_memory_bytes={"trainer_0": 512_000_000}` has "memory/trainer_0_gb": 0.512.

    Raises:
        TypeError: a value that is not a number.
    """
    flat: Flat = {}
    for attribute, metric in _TABLES[type(record)]:
        value = getattr(record, attribute)
        if isinstance(value, Mapping):
            flat.update((metric.name.format(process=key), _number(metric, item)) for key, item in value.items())
        elif value is not None:
            flat[metric.name] = _number(metric, value)

    return flat


def _number(metric: Metric, value: object) -> Number:
    if metric.factor == 1.0 and isinstance(value, numbers.Integral):
        return int(value)

    if isinstance(value, numbers.Real):
        return float(value) * metric.factor

    raise TypeError(f"{metric.name} must be a number, got {value!r} ({type(value).__name__})")


def name_of(kind: type, attribute: str) -> str:
    """Return the tracked name of one field, for whoever reads `metrics.jsonl` back.

    Example: `name_of(StepRecord, "reward_mean")` is "rollout/reward_mean".
    """
    return dict(_TABLES[kind])[attribute].name


def metrics_table() -> Iterator[str]:
    """Yield the lines of the docs' table of metrics (markdown)."""
    yield "| name | unit | meaning |"
    yield "|---|---|---|"
    for metric in METRICS:
        yield f"| `{metric.name}` | {metric.unit or '-'} | {metric.description} |"


def to_json(values: Mapping[str, object], *, indent: int | None = None) -> str:
    """Return strict JSON, on one line unless `indent` is given.

    Non-finite floats become "NaN", "Infinity" and "-Infinity" (as wandb writes them; `float` reads them back), because
    JSON has no such numbers.
    """
    return json.dumps({key: _finite(value) for key, value in values.items()}, allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if not isinstance(value, float) or math.isfinite(value):
        return value

    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
