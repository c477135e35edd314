"""UserError: what the recipe, the data, a folder or the installation is at fault for. Its message is all that is shown.

Any other exception is ours, a library's or the machine's: it is shown with its type and keeps its traceback.
"""

from __future__ import annotations


class UserError(ValueError):
    """Something that the user gave us cannot be used; the message says what, both values and the cure."""
