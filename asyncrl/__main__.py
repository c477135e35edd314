"""The `asyncrl` command: every `python -m asyncrl.X` as a subcommand, `asyncrl X`.

A subcommand's module has a `main(argv) -> int`; only the chosen one is imported, so that help stays quick.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": ("asyncrl.train", "run a recipe: rollouts and training side by side"),
    "plan": ("asyncrl.plan", "what it costs to bring a model from a training to an inference layout"),
    "schema": ("asyncrl.schema", "print the JSON schema of recipes, for editors"),
}
"""Subcommand -> (module with its `main`, one line of help)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Args:
        argv: the subcommand and its arguments; None takes the process's own.

    Example: `main(["train", "--config", "configs/grpo_copy.yaml", "seed=1"])` is
    `python -m asyncrl.train --config configs/grpo_copy.yaml seed=1`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in {"-h", "--help"}:
        print(_help())
        return 0 if words else 2

    if words[0] in {"-V", "--version"}:
        from asyncrl import __version__

        print(f"asyncrl {__version__}")
        return 0

    name, *rest = words
    if name not in COMMANDS:
        print(f"asyncrl: no command '{name}'{_nearest(name)}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2

    module, _ = COMMANDS[name]
    return int(importlib.import_module(module).main(rest))


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: asyncrl COMMAND [ARGUMENT ...]     (the same as python -m asyncrl.COMMAND ...)",
            "",
            "commands:",
            *lines,
            "",
            "`asyncrl COMMAND --help` says more about one of them; `asyncrl --version` prints the version.",
        ]
    )


def _nearest(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, COMMANDS, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


if __name__ == "__main__":
    sys.exit(main())
