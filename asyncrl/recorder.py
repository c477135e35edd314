"""Recorder: what the loops did becomes records, once, for every tracker, the console and the summary."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.fingerprints import Fingerprints
from asyncrl.idle import BusyClock
from asyncrl.metrics import EvalRecord, SampleRow, StepRecord
from asyncrl.scheduler import StepOutcome
from asyncrl.scoring import accuracy
from asyncrl.summary import SummaryBuilder
from asyncrl.tracker import Tracker
from asyncrl.types import Group, Trajectory
from asyncrl.wave import Wave


class Recorder:
    """Turns step outcomes and evaluations into records. Called from the loops, so it never waits for anything."""

    def __init__(
        self,
        tracker: Tracker,
        summary: SummaryBuilder,
        fingerprints: Fingerprints,
        busy: BusyClock,
        *,
        store_bytes: int,
        num_sample_rows: int,
    ) -> None:
        """Args:
        store_bytes: shared memory that holds versions.
        num_sample_rows: rollouts shown in full at each evaluation.
        """
        self._tracker = tracker
        self._summary = summary
        self._fingerprints = fingerprints
        self._busy = busy
        self._store_bytes = store_bytes
        self._num_sample_rows = num_sample_rows

    def step(self, outcome: StepOutcome) -> None:
        """Report one trained step."""
        record = self._step_record(outcome)
        self._fingerprints.step(outcome)
        self._summary.step(record)
        self._tracker.step(record)

    def evaluation(self, record: EvalRecord, sampled: tuple[Group, ...]) -> None:
        """Report one evaluation, with some of its rollouts in full."""
        self._summary.evaluation(record)
        self._tracker.evaluation(record)
        self._tracker.samples(_sample_rows(record, sampled, self._num_sample_rows))

    def _step_record(self, outcome: StepOutcome) -> StepRecord:
        wave, result = outcome.scored.wave, outcome.result
        samples = [t for group in outcome.scored.groups for t in group.trajectories]
        rewards = [t.reward for t in samples]
        lap = self._busy.lap()
        return StepRecord(
            step=result.step,
            version=result.version,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            entropy=result.entropy,
            clip_fraction=result.clip_fraction,
            ratio_max=result.ratio_max,
            generator_kl=result.generator_kl,
            num_tokens=result.num_tokens,
            num_loss_tokens=outcome.scored.batch.num_loss_tokens,
            skipped=result.skipped,
            reward_mean=_mean(rewards),
            reward_std=_standard_deviation(rewards),
            accuracy=accuracy(outcome.scored.groups),
            response_length_mean=_mean([len(t.token_ids) for t in samples]),
            finished_share=_mean([float(t.finish_reason == "stop") for t in samples]),
            num_samples=len(samples),
            num_failures=sum(len(group.failures) for group in outcome.scored.groups),
            num_response_tokens=sum(len(t.token_ids) for t in samples),
            staleness=outcome.staleness,
            step_s=lap.wall_s,
            generate_s=wave.ended_s - wave.started_s,
            train_s=outcome.ended_s - outcome.started_s,
            trainer_wait_s=lap.trainer_wait_s,
            generator_wait_s=lap.generator_wait_s,
            trainer_idle=lap.trainer_idle,
            generator_idle=lap.generator_idle,
            overlap=lap.overlap,
            snapshot_ms=result.timings_ms.get("snapshot"),
            prepare_ms=wave.publish.prepare_ms if wave.publish.flips else None,
            flip_ms=wave.publish.flip_ms if wave.publish.flips else None,
            publish_bytes=self._moved_bytes(wave),
            publish_memory_bytes=self._store_bytes,
            peak_memory_bytes={f"trainer_{rank}": peak for rank, peak in enumerate(result.peak_memory_bytes)},
        )

    def _moved_bytes(self, wave: Wave) -> int | None:
        return sum(flip.num_bytes for flip in wave.publish.flips) if wave.publish.flips else None


def _sample_rows(record: EvalRecord, groups: tuple[Group, ...], num_rows: int) -> list[SampleRow]:
    answered = [group for group in groups if group.trajectories]
    return [_sample_row(record, group, group.trajectories[0]) for group in answered[:num_rows]]


def _sample_row(record: EvalRecord, group: Group, trajectory: Trajectory) -> SampleRow:
    return SampleRow(
        step=record.step,
        version=record.version,
        prompt=group.prompt.text,
        response=trajectory.text,
        answer=group.prompt.answer,
        reward=trajectory.reward,
        correct=trajectory.correct,
        finish_reason=trajectory.finish_reason,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _standard_deviation(values: Sequence[float]) -> float | None:
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) if mean is not None else None
