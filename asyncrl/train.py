"""`python -m asyncrl.train --config RECIPE [key=value ...]`: run a recipe. Parse, check, run.

Exit status: 0 the run reached its last step; 1 it failed; 2 the recipe, the data, the folder or the installation is at
fault; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.user_error import UserError

if TYPE_CHECKING:
    from signal import Signals

    from asyncrl.config import LoadedRecipe
    from asyncrl.console import Console
    from asyncrl.rewards import RewardFunction
    from asyncrl.run import RunRequest
    from asyncrl.run_folder import RunFolder

_STARTED_S = time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    if (arguments.config is None) == (arguments.resume is None):
        print("asyncrl train: give --config RECIPE, or --resume RUN", file=sys.stderr)
        return 2

    try:
        return _resume_or_start(arguments)
    except UserError as error:  # named in one line or several
        print(f"asyncrl train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before anything was started, or after everything has ended
        print("asyncrl train: ended by SIGINT", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl train",
        description="Run a recipe: vLLM writes rollouts while Megatron-Core trains on those of the version before.",
        epilog="example: python -m asyncrl.train --config configs/grpo_copy.yaml seed=1 trainer.num_steps=100",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change a field of the recipe")
    parser.add_argument("--config", metavar="RECIPE", type=Path, help="a YAML recipe, see configs/")
    parser.add_argument("--resume", metavar="RUN", type=Path, help="go on with the run in this folder")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe, layouts, staleness; stop")
    parser.add_argument("--quiet", action="store_true", help="only warnings, errors and the closing line")
    return parser


def _resume_or_start(arguments: argparse.Namespace) -> int:
    from asyncrl.checks import check_resume
    from asyncrl.config import load_recipe, read_written
    from asyncrl.recipe_errors import RecipeError
    from asyncrl.run_folder import RECIPE

    path = arguments.config if arguments.config is not None else arguments.resume / RECIPE
    loaded = load_recipe(path, arguments.overrides)
    if arguments.resume is not None and arguments.overrides:
        problems = check_resume(read_written(path), loaded.public)
        if problems:
            raise RecipeError(*(problem.describe(loaded.public) for problem in problems))

    if arguments.dry_run:
        from asyncrl.dry_run import describe

        print(describe(loaded))
        return 0

    from asyncrl.stack import require_stack

    require_stack()
    return _run(arguments, loaded)


def _run(arguments: argparse.Namespace, loaded: LoadedRecipe) -> int:
    from asyncrl.rewards import load_reward
    from asyncrl.run_folder import RunFolder

    reward = load_reward(loaded.recipe.reward)  # now: a run that cannot start gets no folder
    if arguments.resume is not None:
        opened = RunFolder.reopen(arguments.resume)
    else:
        opened = RunFolder.create(loaded.recipe.run.folder(datetime.now().astimezone()), loaded.unresolved_yaml)
    with opened as folder:
        return _run_in(folder, arguments, loaded, reward)


def _run_in(opened: RunFolder, arguments: argparse.Namespace, loaded: LoadedRecipe, reward: RewardFunction) -> int:
    from asyncrl.checkpoint import CheckpointStore
    from asyncrl.console import Console
    from asyncrl.run import RunRequest
    from asyncrl.summary import is_finished

    recipe, folder = loaded.recipe, opened.path
    resume = None
    if arguments.resume is not None:
        store = CheckpointStore(folder, seed=recipe.seed, keep_last=recipe.checkpoint.keep_last)
        resume = store.newest()
        if resume.state.version > recipe.trainer.num_steps:
            raise UserError(
                f"trainer.num_steps={recipe.trainer.num_steps}, but {arguments.resume} has trained "
                f"{resume.state.version} steps already; ask for more"
            )

        if resume.state.version == recipe.trainer.num_steps and is_finished(folder):
            print(f"all {recipe.trainer.num_steps} steps are trained; `--resume RUN trainer.num_steps=N` trains more")
            return 0

        opened.remember(loaded.unresolved_yaml)

    request = RunRequest(loaded=loaded, reward=reward, folder=folder, resume=resume, started_s=_STARTED_S)
    with Console(num_steps=recipe.trainer.num_steps, live=recipe.tracking.console, quiet=arguments.quiet) as console:
        return _drive(request, console)


def _drive(request: RunRequest, console: Console) -> int:
    """Run on the event loop until it ends by itself or a signal ends it."""
    import anyio

    from asyncrl.run_report import describe_error

    try:
        anyio.run(_until_done_or_signal, request, console)
    except BaseExceptionGroup as group:
        interrupted, rest = group.split(Interrupted)
        if rest is None and interrupted is not None:
            console.error(describe_error(interrupted))
            return 130

        error = rest if rest is not None else group
        users = error.split(UserError)[0]
        console.error(describe_error(users if users is not None else error))
        return 2 if users is not None else 1

    return 0


class Interrupted(RuntimeError):
    """The user asked the run to end."""


async def _until_done_or_signal(request: RunRequest, console: Console) -> None:
    import signal

    import anyio

    from asyncrl.run import run

    # The receiver outlives the tasks, so that a second, impatient Ctrl-C does not break into the cleaning up.
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_raise_on_signal, signals)
            await run(request, console)
            tasks.cancel_scope.cancel()  # nobody need wait for a signal any more


async def _raise_on_signal(signals: AsyncIterator[Signals]) -> None:
    async for number in signals:
        raise Interrupted(f"ended by {number.name}")


if __name__ == "__main__":
    sys.exit(main())
