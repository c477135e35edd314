"""Rows of questions from JSONL and parquet files. A broken row is named by file and line (row) number.

One object a line: `prompt` (text or chat messages), `answer` (text or number), optionally `id`; others are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.tokenizer import Message
from asyncrl.user_error import UserError


class DataError(UserError):
    """A row, file or task that cannot be used; the message starts with where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One valid row.

    Attributes:
        place: "file:line", or "file: row n" of a parquet file, counted from 1.
        uid: the row's `id`, or the file's stem and the row's number, for instance "train-000017".
        prompt: text or chat messages, not empty.
        answer: as text.
    """

    place: str
    uid: str
    prompt: str | tuple[Message, ...]
    answer: str


def read_rows(path: Path) -> tuple[FileRow, ...]:
    """Read a whole file.

    Raises:
        DataError: an unreadable, broken or empty file; two rows of one id; no pyarrow for a parquet file.
    """
    entries = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    rows: list[FileRow] = []
    places: dict[str, str] = {}
    for place, number, entry in entries:
        row = _check_row(place, f"{path.stem}-{number:06d}", entry)
        if row.uid in places:
            raise DataError(f'{place}: id "{row.uid}" is taken by {places[row.uid]}')

        places[row.uid] = place
        rows.append(row)

    if not rows:
        raise DataError(f"{path}: no rows")

    return tuple(rows)


def _read_jsonl(path: Path) -> Iterator[tuple[str, int, object]]:
    """Yield (place, line number, parsed line); blank lines are passed over."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None

    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue

        place = f"{path}:{number}"
        try:
            yield place, number, json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: not JSON: {error.msg} at column {error.colno}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: not UTF-8 text: byte {error.start} of the line") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, int, object]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise DataError(f"{path}: parquet needs pyarrow: install asyncrl[data]") from None

    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}") from None

    for number, entry in enumerate(table.to_pylist(), start=1):
        yield f"{path}: row {number}", number, entry


def _check_row(place: str, default_uid: str, entry: object) -> FileRow:
    if not isinstance(entry, dict):
        raise DataError(f"{place}: must be an object with prompt and answer, not {_kind(entry)}")

    for key in ("prompt", "answer"):
        if entry.get(key) is None:
            raise DataError(f"{place}: no {key}; keys here: {', '.join(map(str, entry)) or 'none'}")

    answer, uid = entry["answer"], entry.get("id")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(f"{place}: answer must be text or a number, not {_kind(answer)}")

    if uid is not None and (isinstance(uid, bool) or not isinstance(uid, str | int) or uid == ""):
        raise DataError(f"{place}: id must be text or a whole number, not {_kind(uid)}")

    return FileRow(
        place=place,
        uid=str(uid) if uid is not None else default_uid,
        prompt=check_prompt(place, entry["prompt"]),
        answer=str(answer),
    )


def check_prompt(place: str, prompt: object) -> str | tuple[Message, ...]:
    """Return a prompt that is text or a list of chat messages, not empty; refuse any other.

    Raises:
        DataError: naming `place`.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{place}: prompt is empty")

        return prompt

    if not isinstance(prompt, list | tuple):
        raise DataError(f"{place}: prompt must be text or a list of messages, not {_kind(prompt)}")

    if not prompt:
        raise DataError(f"{place}: prompt has no messages")

    return tuple(_check_message(f"{place}: message {number}", entry) for number, entry in enumerate(prompt, start=1))


def _check_message(place: str, entry: Any) -> Message:  # noqa: ANN401 - whatever the file holds
    if not isinstance(entry, Mapping) or set(entry) != {"role", "content"}:
        keys = f"keys {', '.join(map(str, entry))}" if isinstance(entry, Mapping) else _kind(entry)
        raise DataError(f"{place} must have exactly role and content, not {keys}")

    role, content = entry["role"], entry["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"{place}: role and content must be text, not {_kind(role)} and {_kind(content)}")

    return Message(role=role, content=content)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
