"""The console: what it shows in its three forms, how often it draws, and that nothing in a text can steer it."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest
import rich.console

from asyncrl.console import Console
from asyncrl.metrics import EvalRecord, SampleRow, StepRecord
from asyncrl.summary import ExitReason, Summary, SummaryBuilder

MakeStepRecord = Callable[..., StepRecord]


class Screen:
    """A console with a hand clock whose outputs can be read."""

    def __init__(self, *, terminal: bool = False, quiet: bool = False, live: bool = True, num_steps: int = 300) -> None:
        self.now = 0.0
        self._out, self._err = io.StringIO(), io.StringIO()
        self.console = Console(
            num_steps=num_steps,
            live=live,
            quiet=quiet,
            clock=lambda: self.now,
            output=rich.console.Console(file=self._out, force_terminal=terminal, width=120, color_system=None),
            errors=rich.console.Console(file=self._err, force_terminal=terminal, width=120, color_system=None),
        )

    @property
    def out(self) -> str:
        return self._out.getvalue()

    @property
    def err(self) -> str:
        return self._err.getvalue()


EVALUATION = EvalRecord(
    version=40, sampled_accuracy=0.9, greedy_accuracy=0.95, reward_mean=None, num_prompts=64, num_failures=0, eval_s=1.5
)


def an_end() -> Summary:
    builder = SummaryBuilder(seed=0)
    builder.memory({"trainer_0": 500_000_000, "driver": 200_000_000})
    return builder.build(exit_reason=ExitReason.FINISHED, wall_s=1.5, startup_s=None, idle=None)


def test_plain_lines_say_everything_in_one_line(step_record: MakeStepRecord) -> None:
    screen = Screen()
    screen.console.step(step_record())
    assert screen.out == (
        "step 4/300  reward 0.500  accuracy 0.750  loss -0.2500  staleness 1  5,120 tokens/s  "
        "idle trainer 10%  generator 20%  publish 7.0 ms 0.5 MB of 1.5 MB held  left 2:28\n"
    )


def test_plain_lines_come_every_few_seconds_and_for_the_last_step(step_record: MakeStepRecord) -> None:
    screen = Screen(num_steps=100)
    for step in range(100):
        screen.now = step * 0.5
        screen.console.step(step_record(step=step, version=step + 1))
    shown = [int(line.split()[1].split("/")[0]) for line in screen.out.splitlines()]
    assert shown == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]


def test_what_is_not_known_is_not_shown(step_record: MakeStepRecord) -> None:
    screen = Screen()
    unknown = dict.fromkeys(("reward_mean", "accuracy", "staleness", "trainer_idle", "generator_idle"))
    publish = dict.fromkeys(("snapshot_ms", "prepare_ms", "flip_ms"))
    screen.console.step(step_record(**unknown, **publish, step_s=0.0, num_failures=3))
    assert screen.out == "step 4/300  loss -0.2500  failed 3\n"


def test_shares_and_rates_are_over_the_recent_steps_weighted_by_time(step_record: MakeStepRecord) -> None:
    screen = Screen()
    screen.console.step(step_record(step_s=3.0, trainer_idle=0.4, num_response_tokens=100))
    screen.now = 10.0
    screen.console.step(step_record(step_s=1.0, trainer_idle=0.0, num_response_tokens=100))
    last = screen.out.splitlines()[-1]
    assert "idle trainer 30%" in last
    assert "50 tokens/s" in last


def test_a_terminal_gets_a_live_view_with_bar_memory_and_last_evaluation(step_record: MakeStepRecord) -> None:
    screen = Screen(terminal=True, num_steps=8)
    with screen.console as console:
        console.step(step_record())
        console.evaluation(EVALUATION)
        screen.now = 1.0
        console.step(step_record())
    assert "step 4/8 ━━━━━━━━━━━━━━━━━━━━" in screen.out
    assert "memory generator_0 1.50 GB, trainer_0 0.51 GB  evaluation of version 40: sampled 0.900" in screen.out
    assert screen.out.endswith("\x1b[?25h")  # the cursor is back


def test_the_live_view_is_drawn_at_most_twice_a_second(step_record: MakeStepRecord) -> None:
    screen = Screen(terminal=True)
    with screen.console as console:
        for step in range(100):
            screen.now = step / 100  # 100 steps in a second
            console.step(step_record())
        drawn = screen.out.count("step 4/300")
    assert drawn == 2


def test_drawing_twice_a_second_costs_less_than_two_percent_of_a_core(step_record: MakeStepRecord) -> None:
    screen = Screen(terminal=True)
    rounds_s = []
    with screen.console as console:
        for second in range(30):
            before_s = time.process_time()
            for half in (0.0, 0.5):
                screen.now = second + half
                console.step(step_record())
            rounds_s.append(time.process_time() - before_s)
    print(f"CPU of one second's drawing: {min(rounds_s) * 1000:.2f} ms")
    assert min(rounds_s) < 0.02  # the least disturbed second: other programs' noise is not ours


def test_a_warning_does_not_break_the_live_view(step_record: MakeStepRecord) -> None:
    screen = Screen(terminal=True)
    with screen.console as console:
        console.step(step_record())
        console.warning("slow disk")
    assert "warning: slow disk" in screen.out
    assert screen.err == ""


def test_live_can_be_switched_off(step_record: MakeStepRecord) -> None:
    screen = Screen(terminal=True, live=False)
    screen.console.step(step_record())
    assert screen.out.count("\n") == 1
    assert "\x1b" not in screen.out


def test_quiet_leaves_warnings_errors_and_the_closing_line(step_record: MakeStepRecord) -> None:
    screen = Screen(quiet=True, terminal=True)
    with screen.console as console:
        console.line("starting")
        console.step(step_record())
        console.evaluation(EVALUATION)
        console.warning("more ranks than cores")
        console.error("the trainer died")
        console.finish(an_end())
    assert screen.out == an_end().closing_line() + "\n"
    assert screen.err == "warning: more ranks than cores\nerror: the trainer died\n"


def test_the_end_shows_peak_memory_and_one_closing_line(step_record: MakeStepRecord) -> None:
    screen = Screen()
    assert screen.console.start() == ""
    screen.console.finish(an_end())
    assert screen.out == f"peak memory: driver 0.20 GB, trainer_0 0.50 GB\n{an_end().closing_line()}\n"


def test_an_evaluation_is_one_line() -> None:
    screen = Screen()
    screen.console.evaluation(EVALUATION)
    assert screen.out == "evaluation of version 40: sampled 0.900  greedy 0.950  (64 prompts, 1.5 s)\n"


HOSTILE = "[bold red]x[/] \x1b[2J\x1b]0;title\x07 \u202e\r"


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_that_a_model_wrote_steers_the_screen(terminal: bool) -> None:
    screen = Screen(terminal=terminal)
    row = SampleRow(
        step=1,
        version=1,
        prompt=HOSTILE,
        response=f"two\nlines {HOSTILE}",
        answer="",
        reward=0.0,
        correct=None,
        finish_reason="stop",
    )
    screen.console.samples([row])
    screen.console.line(HOSTILE)
    screen.console.error(HOSTILE)
    for shown in (screen.out, screen.err):
        assert "\x1b" not in shown
        assert "\r" not in shown
        assert "[bold red]x[/]" in shown
    assert screen.out.count("\n") == 2
    assert r'-> "two\nlines [bold red]x[/] \x1b[2J' in screen.out


def test_long_lines_are_not_broken() -> None:
    screen = Screen()
    screen.console.line("word " * 100)
    screen.console.line("")
    assert screen.out.count("\n") == 1


def test_an_exception_gives_the_terminal_back(step_record: MakeStepRecord) -> None:
    screen = Screen(terminal=True)

    def run() -> None:
        with screen.console as console:
            console.step(step_record())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert screen.out.endswith("\x1b[?25h")
