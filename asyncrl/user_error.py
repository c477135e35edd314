"""UserError: what the recipe, the data, a folder or the installation is at fault for. Its message is all that is shown.

Any other exception is ours, a library's or the machine's: it is shown with its type and keeps its traceback.
"""

from __future__ import annotations

import traceback


class UserError(ValueError):
    """Something that the user gave us cannot be used; the message says what, both values and the cure."""


def raised_where(error: BaseException) -> str:
    """Return what a user's own code raised and where, for a message that stands for its traceback.

    Example: `raised KeyError: 'x' (mine.py:12)`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{where}"
