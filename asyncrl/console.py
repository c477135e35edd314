"""A run's screen: a live view on a terminal, plain lines elsewhere. All text of a run goes through here.

Nothing refreshes by itself: the view is drawn when a record comes, at most twice a second, so no thread competes with
the driver. Texts are never read as markup, and control characters in them are spelled out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.escape import escape
from asyncrl.metrics import EvalRecord, SampleRow, StepRecord
from asyncrl.summary import Summary

_REFRESH_S = 0.5
_PLAIN_S = 5.0
_WINDOW = 20  # rates and shares are over this many steps: single ones jump
_SAMPLE_LIMIT = 200  # characters of one text of a rollout


class Console:
    """The run's screen; a context manager, and a `Tracker` whose `finish` prints the closing line.

    Args:
        num_steps: steps of the whole run, for progress and the time that is left.
        live: whether a terminal gets the live view; plain lines otherwise.
        quiet: only warnings, errors and the closing line.
        clock: seconds; decides when to draw.
        output, errors: rich consoles; standard output and standard error by default.

    Example:
        with Console(num_steps=300) as console:
            console.line("model: 0.136M parameters")
            console.step(record)  # once a step
    """

    def __init__(
        self,
        *,
        num_steps: int,
        live: bool = True,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        output: rich.console.Console | None = None,
        errors: rich.console.Console | None = None,
    ) -> None:
        self._num_steps = num_steps
        self._quiet = quiet
        self._clock = clock
        self._output = output if output is not None else rich.console.Console()
        self._errors = errors if errors is not None else rich.console.Console(stderr=True)
        self._wants_live = live and not quiet and self._output.is_terminal and not self._output.is_dumb_terminal
        self._live: Live | None = None
        self._drawn_s: float | None = None
        self._recent: deque[StepRecord] = deque(maxlen=_WINDOW)
        self._publish = ""
        self._memory: dict[str, int] = {}
        self._evaluated = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_live()

    def line(self, text: str) -> None:
        """Print one piece of information; "" prints nothing."""
        if text and not self._quiet:
            self._print(self._output, text)

    def warning(self, text: str) -> None:
        """Print what the user should know even when quiet: to standard error, or above a live view."""
        self._print(self._errors if self._live is None else self._output, f"warning: {text}", style="yellow")

    def error(self, text: str) -> None:
        """Print why the run ends, to standard error, below the live view."""
        self._end_live()
        self._print(self._errors, f"error: {text}", style="bold red")

    def start(self) -> str:
        """Do nothing: the view appears with the first step."""
        return ""

    def step(self, record: StepRecord) -> None:
        """Take one trained step and draw, if it is time to."""
        self._recent.append(record)
        self._memory |= record.peak_memory_bytes
        if record.publish_ms is not None:
            self._publish = _publish_text(record)
        if self._quiet:
            return

        now = self._clock()
        every_s = _REFRESH_S if self._wants_live else _PLAIN_S
        if self._drawn_s is None or now - self._drawn_s >= every_s or record.version >= self._num_steps:
            self._drawn_s = now
            self._draw(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Print one held-out evaluation; the live view keeps the last one."""
        scores = _join(
            _part("sampled", record.sampled_accuracy, ".3f"),
            _part("greedy", record.greedy_accuracy, ".3f"),
            _part("reward", record.reward_mean, ".3f"),
            f"failed {record.num_failures}" if record.num_failures else "",
        )
        self._evaluated = f"evaluation of version {record.version}: {scores}"
        self.line(f"{self._evaluated}  ({record.num_prompts} prompts, {record.eval_s:.1f} s)")

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """Print some rollouts, a line each."""
        for row in rows:
            prompt, response = (escape(text, limit=_SAMPLE_LIMIT) for text in (row.prompt, row.response))
            self.line(f'  "{prompt}" -> "{response}"  reward {row.reward:.3f}  {row.finish_reason}')

    def finish(self, summary: Summary) -> None:
        """Print peak memory and the closing line, also when quiet."""
        self._end_live()
        if summary.peak_memory and not self._quiet:
            self._print(self._output, f"peak memory: {_memory_text(summary.peak_memory)}")
        self._print(self._output, summary.closing_line(), style="bold")

    def _draw(self, record: StepRecord) -> None:
        if not self._wants_live:
            self._print(self._output, _join(f"step {record.version}/{self._num_steps}", *self._facts(record)))
            return

        if self._live is None:
            self._live = Live(console=self._output, auto_refresh=False)
            self._live.start()
        self._live.update(self._view(record), refresh=True)

    def _facts(self, record: StepRecord) -> tuple[str, ...]:
        """What both forms show, most important first."""
        tokens_per_s = self._rate(sum(recent.num_response_tokens for recent in self._recent))
        steps_per_s = self._rate(len(self._recent))
        left_s = (self._num_steps - record.version) / steps_per_s if steps_per_s else None
        return (
            _part("reward", record.reward_mean, ".3f"),
            _part("accuracy", record.accuracy, ".3f"),
            _part("loss", record.loss, ".4f"),
            _part("staleness", record.staleness, "d"),
            f"{tokens_per_s:,.0f} tokens/s" if tokens_per_s is not None else "",
            _join(
                _part("idle trainer", self._mean_share("trainer_idle"), ".0%"),
                _part("generator", self._mean_share("generator_idle"), ".0%"),
            ),
            self._publish,
            f"failed {record.num_failures}" if record.num_failures else "",
            f"left {_duration(left_s)}" if left_s is not None else "",
        )

    def _view(self, record: StepRecord) -> Table:
        facts = [fact for fact in self._facts(record) if fact]
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(f"step {record.version}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=record.version, width=40),
            Text(facts.pop() if facts and facts[-1].startswith("left ") else ""),
        )
        view = Table.grid()
        view.add_row(head)
        view.add_row(Text(_join(*facts)))
        view.add_row(Text(_join(f"memory {_memory_text(self._memory)}" if self._memory else "", self._evaluated)))
        return view

    def _rate(self, amount: float) -> float | None:
        seconds = sum(record.step_s for record in self._recent)
        return amount / seconds if seconds > 0 else None

    def _mean_share(self, attribute: str) -> float | None:
        """Mean of a share over the recent steps, weighted by their time."""
        known = [(getattr(record, attribute), record.step_s) for record in self._recent]
        weighted = [(share, weight) for share, weight in known if share is not None]
        seconds = sum(weight for _, weight in weighted)
        return sum(share * weight for share, weight in weighted) / seconds if seconds > 0 else None

    def _print(self, console: rich.console.Console, text: str, *, style: str = "") -> None:
        for part in text.split("\n"):
            console.print(Text(escape(part), style=style), soft_wrap=True, highlight=False)

    def _end_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def _publish_text(record: StepRecord) -> str:
    moved, held = record.publish_bytes, record.publish_memory_bytes
    return (
        f"publish {record.publish_ms:.1f} ms"
        + (f" {moved / 1e6:.1f} MB" if moved is not None else "")
        + (f" of {held / 1e6:.1f} MB held" if held is not None else "")
    )


def _memory_text(peaks: Mapping[str, int]) -> str:
    return ", ".join(f"{process} {peak / 1e9:.2f} GB" for process, peak in sorted(peaks.items()))


def _part(name: str, value: float | None, form: str) -> str:
    return f"{name} {value:{form}}" if value is not None else ""


def _join(*parts: str) -> str:
    return "  ".join(part for part in parts if part)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
