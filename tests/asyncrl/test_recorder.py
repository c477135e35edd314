"""The recorder: one step's outcome becomes one record, with a real busy clock on a clock turned by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from asyncrl.fingerprints import Fingerprints
from asyncrl.idle import BusyClock
from asyncrl.line_file import read_lines
from asyncrl.metrics import EvalRecord, SampleRow, StepRecord, flatten
from asyncrl.recorder import Recorder
from asyncrl.scheduler import Scored, StepOutcome
from asyncrl.summary import ExitReason, Summary, SummaryBuilder
from asyncrl.types import Group, Prompt, SampleFailure, Trajectory, VersionSpan
from asyncrl.wave import PublishReport, Wave
from engine.types import FlipReport, WeightVersion
from trainers.types import Batch, StepResult


@dataclass
class HandClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeTracker:
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvalRecord] = field(default_factory=list)
    rows: list[list[SampleRow]] = field(default_factory=list)

    def start(self) -> str:
        raise AssertionError("the recorder starts nothing")

    def step(self, record: StepRecord) -> None:
        flatten(record)  # every field is a number that trackers can take
        self.steps.append(record)

    def evaluation(self, record: EvalRecord) -> None:
        self.evaluations.append(record)

    def samples(self, rows: list[SampleRow]) -> None:
        assert self.evaluations, "samples stand beside their evaluation"
        self.rows.append(list(rows))

    def finish(self, summary: Summary) -> None:
        raise AssertionError("the recorder finishes nothing")


@dataclass
class Desk:
    """A recorder and what it writes to."""

    folder: Path
    num_sample_rows: int = 2
    clock: HandClock = field(default_factory=HandClock)
    tracker: FakeTracker = field(default_factory=FakeTracker)
    summary: SummaryBuilder = field(default_factory=lambda: SummaryBuilder(seed=0))

    def __post_init__(self) -> None:
        self.busy = BusyClock(self.clock, num_replicas=2)
        self.busy.start()
        self.fingerprints = Fingerprints(self.folder, resume_step=None)
        self.fingerprints.open({0: "f" * 32})
        self.recorder = Recorder(
            self.tracker,
            self.summary,
            self.fingerprints,
            self.busy,
            store_bytes=3000,
            num_sample_rows=self.num_sample_rows,
        )


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.fingerprints.close()


def prompt(index: int) -> Prompt:
    return Prompt(uid=f"p{index}", index=index, text=f"ask {index}", token_ids=(1,), answer=f"answer {index}")


def trajectory(reward: float, *, length: int = 2, correct: bool | None = None, finished: bool = True) -> Trajectory:
    return Trajectory(
        prompt_uid="p0",
        sample_index=0,
        draw=0,
        attempt=0,
        token_ids=np.zeros(length, np.int32),
        loss_mask=np.ones(length, np.float32),
        generator_logprobs=np.zeros(length, np.float32),
        versions=(VersionSpan(start=0, stop=length, version=WeightVersion(2)),),
        text=f"text {reward}",
        reward=reward,
        correct=correct,
        finish_reason="stop" if finished else "length",
    )


FAILURE = SampleFailure(prompt_uid="p0", sample_index=3, attempt=2, reason="raised", traceback="")
FLIPS = tuple(FlipReport(version=WeightVersion(2), copy_ms=1, repack_ms=2, num_bytes=400) for _ in range(2))


def group(*trajectories: Trajectory, index: int = 0, failures: tuple[SampleFailure, ...] = ()) -> Group:
    return Group(prompt=prompt(index), trajectories=trajectories, failures=failures)


GROUPS = (
    group(trajectory(1.0, length=3, correct=True), trajectory(0.0, length=5, correct=False, finished=False)),
    group(trajectory(0.5, length=4, correct=False), index=1, failures=(FAILURE,)),
)
RESULT = StepResult(
    step=3,
    version=WeightVersion(4),
    loss=-0.25,
    grad_norm=1.5,
    lr=0.001,
    entropy=2.0,
    clip_fraction=0.125,
    ratio_max=1.25,
    generator_kl=0.002,
    num_tokens=40,
    digests={0: "a" * 32},
    skipped=False,
    timings_ms={"forward_backward": 7.0, "optimizer": 2.0, "snapshot": 0.5, "total": 10.0},
    peak_memory_bytes=(1000, 2000),
)


def outcome(
    groups: tuple[Group, ...] = GROUPS,
    result: StepResult = RESULT,
    *,
    flips: tuple[FlipReport, ...] = FLIPS,
    staleness: int | None = 1,
) -> StepOutcome:
    publish = PublishReport(version=WeightVersion(2), prepare_ms=4.0, flip_ms=8.0, flips=flips)
    wave = Wave(
        step=result.step,
        version=WeightVersion(2),
        prompts=(),
        results=(),
        started_s=10.0,
        ended_s=10.75,
        publish=publish,
    )
    batch = Batch(step=result.step, micro_batches=(), num_loss_tokens=12, oldest_version=WeightVersion(2))
    scored = Scored(wave=wave, groups=groups, batch=batch)
    return StepOutcome(scored=scored, result=result, staleness=staleness, started_s=11.0, ended_s=11.5)


def test_one_step_in_every_field(desk: Desk) -> None:
    with desk.busy.busy("generator", 0):
        desk.clock.now += 3.0
        with desk.busy.busy("trainer"):
            desk.clock.now += 1.0
    desk.recorder.step(outcome())
    (record,) = desk.tracker.steps
    assert record == StepRecord(
        step=3,
        version=4,
        loss=-0.25,
        grad_norm=1.5,
        lr=0.001,
        entropy=2.0,
        clip_fraction=0.125,
        ratio_max=1.25,
        generator_kl=0.002,
        num_tokens=40,
        num_loss_tokens=12,
        skipped=False,
        reward_mean=0.5,
        reward_std=pytest.approx(math.sqrt((0.25 + 0.25 + 0) / 3)),
        accuracy=1 / 4,
        response_length_mean=4.0,
        finished_share=pytest.approx(2 / 3),
        num_samples=3,
        num_failures=1,
        num_response_tokens=12,
        staleness=1,
        step_s=4.0,
        generate_s=0.75,
        train_s=0.5,
        trainer_wait_s=3.0,
        generator_wait_s=2.0,  # one of two replicas had nothing to do
        trainer_idle=0.75,
        generator_idle=0.5,
        overlap=0.25,
        snapshot_ms=0.5,
        prepare_ms=4.0,
        flip_ms=8.0,
        publish_bytes=800,
        publish_memory_bytes=3000,
        peak_memory_bytes={"trainer_0": 1000, "trainer_1": 2000},
    )


def test_every_step_reports_its_own_lap(desk: Desk) -> None:
    desk.clock.now += 3.0
    desk.recorder.step(outcome())
    with desk.busy.busy("trainer"):
        desk.clock.now += 1.0
    desk.recorder.step(outcome())
    first, second = desk.tracker.steps
    assert (first.step_s, first.trainer_idle) == (3.0, 1.0)
    assert (second.step_s, second.trainer_idle) == (1.0, 0.0)


def test_what_a_step_does_not_know_is_none(desk: Desk) -> None:
    """Everything failed, no version was delivered, nothing was trained, and no time has passed."""
    lost = group(failures=(FAILURE,) * 4)
    desk.recorder.step(outcome((lost,), StepResult.skip(3), flips=(), staleness=None))
    (record,) = desk.tracker.steps
    none = {name for name in StepRecord.__slots__ if getattr(record, name) is None}
    assert none == {
        "reward_mean",
        "reward_std",
        "accuracy",
        "response_length_mean",
        "finished_share",
        "staleness",
        "trainer_idle",
        "generator_idle",
        "overlap",
        "snapshot_ms",
        "prepare_ms",
        "flip_ms",
        "publish_bytes",
    }
    assert (record.skipped, record.version, record.num_samples, record.num_failures) == (True, 4, 0, 4)
    assert record.peak_memory_bytes == {}


def test_a_version_without_new_bits_moved_no_bytes(desk: Desk) -> None:
    nothing = tuple(FlipReport(version=WeightVersion(2), copy_ms=0, repack_ms=0, num_bytes=0) for _ in range(2))
    desk.recorder.step(outcome(flips=nothing))
    assert desk.tracker.steps[0].publish_bytes == 0


def test_rewards_without_a_notion_of_right_have_no_accuracy(desk: Desk) -> None:
    desk.recorder.step(outcome((group(trajectory(1.0), trajectory(3.0)),)))
    (record,) = desk.tracker.steps
    assert (record.accuracy, record.reward_mean, record.reward_std) == (None, 2.0, 1.0)


def test_tracker_summary_and_fingerprints_hear_of_the_same_step(desk: Desk, tmp_path: Path) -> None:
    desk.recorder.step(outcome())
    summary = desk.summary.build(exit_reason=ExitReason.FINISHED, wall_s=1.0, startup_s=0.0, idle=None)
    assert (summary.steps, summary.reward_end, summary.staleness_max) == (4, 0.5, 1)
    assert summary.peak_memory == {"trainer_0": 1000, "trainer_1": 2000}
    (line,) = read_lines(tmp_path / "fingerprints.jsonl")
    assert (line["step"], line["version"]) == (3, 2)


EVALUATION = EvalRecord(
    version=40, sampled_accuracy=0.5, greedy_accuracy=0.75, reward_mean=0.5, num_prompts=3, num_failures=1, eval_s=1.0
)


def test_an_evaluation_and_the_first_answer_to_some_of_its_prompts(desk: Desk) -> None:
    groups = (
        group(trajectory(0.25, correct=False, finished=False), trajectory(1.0)),
        group(index=1, failures=(FAILURE,)),
    )
    desk.recorder.evaluation(EVALUATION, groups)
    assert desk.tracker.evaluations == [EVALUATION]
    assert desk.tracker.rows == [
        [
            SampleRow(
                step=40,
                version=40,
                prompt="ask 0",
                response="text 0.25",
                answer="answer 0",
                reward=0.25,
                correct=False,
                finish_reason="length",
            )
        ]
    ]
    summary = desk.summary.build(exit_reason=ExitReason.FINISHED, wall_s=1.0, startup_s=0.0, idle=None)
    assert (summary.eval_sampled, summary.eval_greedy) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("num_sample_rows", "shown"), [(0, []), (1, ["ask 0"]), (2, ["ask 0", "ask 2"]), (5, ["ask 0", "ask 2"])]
)
def test_as_many_rollouts_as_the_recipe_wants(tmp_path: Path, num_sample_rows: int, shown: list[str]) -> None:
    """A prompt whose answers all failed has none to show."""
    desk = Desk(tmp_path, num_sample_rows=num_sample_rows)
    desk.recorder.evaluation(EVALUATION, (group(trajectory(1.0)), group(index=1), group(trajectory(1.0), index=2)))
    assert [row.prompt for row in desk.tracker.rows[0]] == shown
    desk.fingerprints.close()
