"""What a tracker is, and the one for wandb, whose home this is. `asyncrl.metrics_file` has the other one.

Trackers are called from the scheduler's loop, so a call must be cheap: one record costs less than a millisecond of the
driver's CPU (tests/asyncrl/test_tracker.py measures it). Only `start` and `finish` may block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from asyncrl.escape import escape
from asyncrl.metrics import GROUPS, STEP_AXIS, EvalRecord, SampleRow, StepRecord, flatten
from asyncrl.summary import Summary
from asyncrl.user_error import UserError

if TYPE_CHECKING:
    import wandb

WandbMode = Literal["auto", "online", "offline", "disabled"]

_INIT_TIMEOUT_S = 20.0
_FINISH_TIMEOUT_S = 20.0  # what is not uploaded by then stays in the folder, for `wandb sync`
_CELL_LIMIT = 4000  # characters of one text in a table of rollouts
_SAMPLES = "samples/rollouts"


class TrackingError(RuntimeError):
    """A tracker cannot do its work. The message says which, why and what to change."""


class Tracker(Protocol):
    """Takes the records of a run. `start` comes first and `finish` last, once each, whatever happened in between."""

    def start(self) -> str:
        """Make ready; may take seconds, so it is run beside the rest of start-up (`anyio.to_thread.run_sync`).

        Returns:
            One line for the screen, or "" if there is nothing to say.

        Raises:
            TrackingError: it cannot work.
        """
        ...

    def step(self, record: StepRecord) -> None:
        """Take one trained step."""
        ...

    def evaluation(self, record: EvalRecord) -> None:
        """Take one held-out evaluation."""
        ...

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """Take some rollouts to look at, all of one step."""
        ...

    def finish(self, summary: Summary) -> None:
        """Close, also after a `start` that failed or never was. Takes at most `_FINISH_TIMEOUT_S` or so."""
        ...


class WandbTracker:
    """Weights & Biases: step metrics, evaluations, a table of rollouts, the recipe as config.

    Everything that wandb writes is in `folder`/wandb. Nothing is printed, no console is captured, code, git state and
    command line are not looked at (they may hold secrets), and offline nothing touches the network.
    wandb's own process ends with `finish`, and within seconds if this one is killed.

    Args:
        folder: the run's; its name is the run's name in wandb.
        mode: "online", "offline", "disabled" (wandb is not even imported), or "auto": what $WANDB_MODE says, else
            online where an API key is configured, else offline.
        project, entity, group, tags: where the run stands in wandb.
        run_id: the run's own id, the same after a resume, which then continues the wandb run (steps that are trained
            again have two points there; metrics.jsonl has one).
        config: the resolved recipe as plain values, references to the environment unresolved.
        resume: whether this process continues an earlier one.
    """

    def __init__(
        self,
        *,
        folder: Path,
        mode: WandbMode,
        project: str,
        run_id: str,
        config: Mapping[str, object],
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        resume: bool = False,
    ) -> None:
        if mode not in get_args(WandbMode):
            raise UserError(f"tracking.wandb.mode must be one of {', '.join(get_args(WandbMode))}, got {mode!r}")

        self._folder = folder
        self._mode: WandbMode = mode
        self._project = project
        self._run_id = run_id
        self._config = config
        self._entity = entity
        self._group = group
        self._tags = tuple(tags)
        self._resume = resume
        self._run: wandb.Run | None = None
        self._cleanup = ExitStack()

    def start(self) -> str:
        """Start wandb and its process; see `Tracker.start`.

        Raises:
            TrackingError: wandb refuses (bad key, no key, no network...); names the cure.
        """
        mode = os.environ.get("WANDB_MODE", "auto") if self._mode == "auto" else self._mode
        if mode not in get_args(WandbMode):
            raise TrackingError(f"$WANDB_MODE must be one of {', '.join(get_args(WandbMode))}, got {mode!r}")

        if mode == "disabled":
            return ""

        with ExitStack() as cleanup:
            cleanup.callback(_set_environment(self._folder / "wandb"))  # before the import, which reads it
            import wandb

            cleanup.callback(wandb.teardown)
            try:
                line = self._start(mode)
            except wandb.Error as error:
                raise TrackingError(
                    f"wandb ({mode}) did not start: {error}; log in with `wandb login`, or set "
                    "tracking.wandb.mode to offline or disabled"
                ) from error

            self._cleanup = cleanup.pop_all()
        return line

    def step(self, record: StepRecord) -> None:
        """Log the step's metrics."""
        self._log(flatten(record), record.step)

    def evaluation(self, record: EvalRecord) -> None:
        """Log the evaluation's metrics, at its version on the step axis."""
        self._log(flatten(record), record.step)

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """Log a table of rollouts; each call is one table, wandb shows the last and keeps the others."""
        if self._run is None or not rows:
            return

        import wandb

        table = wandb.Table(columns=list(asdict(rows[0])), data=[_cells(row) for row in rows])
        self._log({STEP_AXIS: rows[0].step, _SAMPLES: table}, rows[0].step)

    def finish(self, summary: Summary) -> None:
        """Hand over the summary, mark the run finished or failed, and end wandb's process.

        Raises:
            TrackingError: wandb's process is gone, so its last records may be too.
        """
        run, self._run = self._run, None
        try:
            with self._cleanup:  # teardown, even if the run cannot be finished
                if run is not None:
                    run.summary.update({f"summary/{key}": value for key, value in summary.as_dict().items()})
                    run.finish(exit_code=summary.exit_code)
        except OSError as error:
            raise TrackingError(f"wandb died before the end ({error}); metrics.jsonl is complete") from error

    def _start(self, mode: str) -> str:
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            init_timeout=_INIT_TIMEOUT_S,
            finish_timeout=_FINISH_TIMEOUT_S,
        )
        setup = wandb.setup(settings=settings)  # silent from here on
        online = mode == "online" or (mode == "auto" and _has_key(setup.settings.base_url))
        if mode == "online" and not _has_key(setup.settings.base_url):
            raise wandb.Error(f"no API key is configured for {setup.settings.base_url}")

        settings.x_disable_stats = not online  # they cost a second process
        (self._folder / "wandb").mkdir(mode=0o700, exist_ok=True)
        self._run = wandb.init(
            dir=self._folder,
            mode="online" if online else "offline",
            project=self._project,
            entity=self._entity,
            group=self._group,
            tags=self._tags,
            id=self._run_id,
            name=self._folder.name,
            config=dict(self._config),
            resume="allow" if self._resume and online else None,
            settings=settings,
        )
        self._run.define_metric(STEP_AXIS)
        for group in (*GROUPS, _SAMPLES.split("/")[0]):
            self._run.define_metric(f"{group}/*", step_metric=STEP_AXIS)
        if online:
            return f"wandb: {self._run.url}"

        return f"wandb: offline; upload later with `wandb sync {Path(self._run.dir).parent}`"

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        if self._run is None:
            return

        try:
            self._run.log(dict(values))  # never step=: the step is a metric of its own
        except OSError as error:
            self._run = None  # said once; `finish` only cleans up then
            with suppress(OSError):
                self._cleanup.close()
            raise TrackingError(
                f"wandb died at step {step} ({error}); metrics.jsonl is complete. Resume the run, or set "
                "tracking.wandb.mode=disabled"
            ) from error


class FanoutTracker:
    """Several trackers as one; all of them are finished, even if one cannot be."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def start(self) -> str:
        """Start one after the other; if one fails, those before it stay started until `finish`."""
        return "\n".join(filter(None, [tracker.start() for tracker in self._trackers]))

    def step(self, record: StepRecord) -> None:
        """Hand on."""
        for tracker in self._trackers:
            tracker.step(record)

    def evaluation(self, record: EvalRecord) -> None:
        """Hand on."""
        for tracker in self._trackers:
            tracker.evaluation(record)

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """Hand on."""
        for tracker in self._trackers:
            tracker.samples(rows)

    def finish(self, summary: Summary) -> None:
        """Finish all, the last one first; the error of one that fails is raised when the others are done."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.finish, summary)


def _cells(row: SampleRow) -> list[object]:
    return [escape(value, limit=_CELL_LIMIT) if isinstance(value, str) else value for value in asdict(row).values()]


def _has_key(base_url: str) -> bool:
    """Ask wandb whether credentials are configured for its server (environment, netrc, settings); no network.

    Raises:
        wandb.Error: there are some, of a form that cannot be right.
    """
    from wandb.sdk.lib.wbauth import authenticate_session

    return authenticate_session(host=base_url, source="asyncrl", prompt=False, update_session=False) is not None


def _set_environment(folder: Path) -> Callable[[], None]:
    """Keep wandb's files in the run's folder and its error reports at home; return what takes that back.

    Settings cannot say these things. Without WANDB_ERROR_REPORTING=false wandb's process looks up a telemetry server
    even when offline (seen with strace, 0.31). What the user has set stays.
    """
    wanted = {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "data"),
    }
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)

    def restore() -> None:
        for name in added:
            os.environ.pop(name, None)

    return restore
