"""Files of JSON lines: whole lines after any kill, and errors that name file, line and cure."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.line_file import LineFile, read_lines
from asyncrl.tracker import TrackingError

VALUES = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), max_size=4
)


def everything(_: Mapping[str, Any]) -> bool:
    return True


def before(step: int) -> Any:  # noqa: ANN401
    return lambda line: line["step"] < step


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def write(path: Path, *lines: Mapping[str, object], resume_step: int | None = None, keep: Any = everything) -> None:  # noqa: ANN401
    file = LineFile(path, resume_step=resume_step)
    file.open(keep)
    try:
        for line in lines:
            file.write(line)
    finally:
        file.close()


@given(st.lists(VALUES, max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    write(path, *lines)
    assert list(read_lines(path)) == [
        {key: str(value).replace("inf", "Infinity") if value in INFINITE else value for key, value in line.items()}
        for line in lines
    ]
    assert path.read_bytes().count(b"\n") == len(lines)


INFINITE = (float("inf"), float("-inf"))


def test_a_line_is_there_at_once_and_private(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "a.jsonl", resume_step=None)
    file.open(everything)
    file.write({"step": 0})
    assert (tmp_path / "a.jsonl").read_text() == '{"step": 0}\n'
    assert stat.S_IMODE((tmp_path / "a.jsonl").stat().st_mode) == 0o600
    file.close()


@pytest.mark.parametrize("torn", ["", '{"step": 3', '{"step": 3}', "\0\0\0"])
def test_a_resume_keeps_what_is_wanted_and_drops_a_torn_line(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "a.jsonl"
    write(path, *({"step": step} for step in range(3)))
    with path.open("a") as file:
        file.write(torn)
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2]
    write(path, {"step": 2, "again": True}, resume_step=2, keep=before(2))
    assert list(read_lines(path)) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]
    assert os.listdir(tmp_path) == ["a.jsonl"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_resume_of_a_run_that_has_no_file_yet(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"step": 0}, resume_step=0)
    assert list(read_lines(tmp_path / "a.jsonl")) == [{"step": 0}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops", r"a\.jsonl:2 is not JSON \(.*\); remove the line to resume"),
        (b'{"step": "\xff"}', r"a\.jsonl:2 is not JSON \(.*\); remove the line to resume"),
        (b'"\\u001b[2J"', r'a\.jsonl:2 is not a JSON object: "\\u001b\[2J"; remove the line to resume'),
        (b'{"time": 3}', r"a\.jsonl:2 is not a line of a run \('step'\); remove the line to resume"),
        (b'{"step": null}', r"a\.jsonl:2 is not a line of a run \(.*NoneType.*\); remove the line to resume"),
    ],
)
def test_a_broken_line_is_named_and_nothing_is_lost_or_leaked(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 1}\n')
    old, descriptors = path.read_bytes(), open_descriptors()
    with pytest.raises(TrackingError, match=message):
        LineFile(path, resume_step=2).open(before(2))
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.jsonl"]
    assert open_descriptors() == descriptors
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n')
    write(path, resume_step=2, keep=before(2))  # the cure works


def test_a_new_runs_file_must_not_be_there(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"step": 0})
    with pytest.raises(TrackingError, match=r"a\.jsonl is there already: resume that run, or choose another run\.dir"):
        write(tmp_path / "a.jsonl")
    assert list(read_lines(tmp_path / "a.jsonl")) == [{"step": 0}]


def test_a_full_disk_is_loud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    file = LineFile(tmp_path / "a.jsonl", resume_step=None)
    file.open(everything)
    file.write({"step": 0})
    monkeypatch.setattr("asyncrl.line_file.os.write", lambda descriptor, data: real(descriptor, data[:4]))
    with pytest.raises(TrackingError, match=r"a\.jsonl: only 4 of 12 bytes of a line written; disk full\?"):
        file.write({"step": 1})
    file.close()
    assert list(read_lines(tmp_path / "a.jsonl")) == [{"step": 0}], "the torn line counts as not there"


def test_closing_twice_closes_nobody_elses_descriptor(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "a.jsonl", resume_step=None)
    file.close()  # never opened
    file.open(everything)
    file.close()
    with (tmp_path / "other").open("w") as other:  # takes the number that became free
        file.close()
        other.write("still open")
    assert (tmp_path / "other").read_text() == "still open"
