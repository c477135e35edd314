"""Text that a model (or a data file) wrote, made safe to show: one place, used by the console and by tables."""

from __future__ import annotations

import unicodedata

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def escape(text: str, *, limit: int | None = None) -> str:
    r"""Return `text` on one line without characters that move a cursor, change direction or cannot be encoded.

    Control and format characters, surrogates, private and unassigned code points and line separators appear as their
    Python escapes. Backslashes stay as they are, so the result is for eyes and cannot be turned back.

    Args:
        text: anything a model, a data file or an error message says.
        limit: most characters of `text` that are shown; what was cut is counted.

    Example: `escape("a\x1b[31mb\n")` is `a\x1b[31mb\n` with both escapes spelled out; `escape("abcdef", limit=4)` is
    "abcd... (+2 characters)".
    """
    shown = text if limit is None else text[:limit]
    safe = shown if shown.isascii() and shown.isprintable() else "".join(map(_escape_character, shown))
    return safe if len(shown) == len(text) else f"{safe}... (+{len(text) - len(shown)} characters)"


def _escape_character(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]

    if unicodedata.category(character) not in _UNSAFE:
        return character

    return character.encode("unicode_escape").decode("ascii")
