"""Asynchronous reinforcement learning for language models: the top layer (CLI, recipes, scheduler, rollout, tracking).

The project is three import packages, `asyncrl -> trainers -> engine`. The two lower names are common ones, so importing
`asyncrl` first makes sure that Python finds ours and not a folder of the same name in the user's working directory.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

__version__ = "0.1.0.dev0"

_SIBLINGS = ("engine", "trainers")


def _check_siblings() -> None:
    """Check that `engine` and `trainers` lie beside `asyncrl`, without importing them.

    Raises:
        ImportError: another package or module of that name comes first on Python's path, or none is found.
    """
    home = Path(__file__).resolve().parent.parent
    for name in _SIBLINGS:
        expected = home / name / "__init__.py"
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"asyncrl's package '{name}' is missing: expected {expected}. Install asyncrl again.")

        places = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
        if Path(places[0]).resolve() != expected:
            raise ImportError(
                f"asyncrl's package '{name}' is shadowed by {places[0]} (expected {expected}). "
                f"Cures: start with the `asyncrl` command, or with `python -P -m asyncrl.<command>`, "
                f"or from a folder that has no '{name}' of its own (PYTHONPATH counts too)."
            )


_check_siblings()
