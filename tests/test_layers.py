"""The import contracts of pyproject.toml hold, and each of them would notice a breach."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("asyncrl", "engine", "trainers")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the three packages in `folder`, and on no others that Python would find."""
    command = [
        sys.executable,
        "-P",
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-cache",
    ]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=60
    )


def test_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("place", "line", "contract"),
    [
        ("engine/new_file.py", "import trainers.types", "never up"),
        ("engine/new_file.py", "import asyncrl.types", "never up"),
        ("trainers/new_file.py", "from asyncrl.types import Prompt", "never up"),
        ("asyncrl/new_file.py", "from vllm.sampling_params import SamplingParams", "vllm is imported"),
        ("engine/new_file.py", "import megatron.core", "megatron is imported"),
        ("trainers/new_file.py", "import ray", "ray is imported"),
        ("asyncrl/new_file.py", "import wandb", "wandb is imported"),
    ],
)
def test_a_breach_is_noticed(tmp_path: Path, place: str, line: str, contract: str) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / place).write_text(f"def use() -> None:\n    {line}\n")  # inside a function: that counts too

    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout
    broken = [text for text in done.stdout.splitlines() if "BROKEN" in text]
    assert any(contract in text for text in broken), done.stdout
