"""The `asyncrl` command: what is in the table, what is said about what is not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import asyncrl
from asyncrl.__main__ import COMMANDS, main

PACKAGE = Path(asyncrl.__file__).parent


def test_every_module_that_runs_is_a_subcommand() -> None:
    guard = re.compile(r'^if __name__ == "__main__":', flags=re.MULTILINE)
    files = {
        path.stem for path in PACKAGE.glob("*.py") if path.name != "__main__.py" and guard.search(path.read_text())
    }
    folders = {path.parent.name for path in PACKAGE.glob("*/__main__.py")}
    assert files | folders == set(COMMANDS)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, (_, line) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", text, flags=re.MULTILINE)


def test_no_command_is_an_error_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: asyncrl COMMAND" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"asyncrl {asyncrl.__version__}\n"


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "no command 'trian' (did you mean 'train'?)" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_subcommand_is_the_module(command: str) -> None:
    def output(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", *arguments, "--help"], capture_output=True, text=True, check=True, timeout=60
        ).stdout

    assert output("asyncrl", command) == output(f"asyncrl.{command}")
