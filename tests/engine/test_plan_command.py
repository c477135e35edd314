"""`python -m engine.plan`: what it prints, what it refuses, what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.families import megatron_layout, vllm_layout
from engine.plan import make_plan
from engine.plan_command import MODELS, main, read_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, make_config: Any) -> Path:  # noqa: ANN401 - conftest's fixture
    """A small config.json."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(make_config(vocab_size=64, torch_dtype="bfloat16")))
    return path


def test_the_figures_are_those_of_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(config), "--train", "tp=2,pp=2", "--infer", "tp=1", "--bucket-mb", "0.001", "--json"]
    assert main(arguments) == 0
    *table, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)

    hf_config = json.loads(config.read_text())
    plan = make_plan(megatron_layout(hf_config, tp=2, pp=2), vllm_layout(hf_config, tp=1), bucket_bytes=1048)
    assert found["plan_hash"] == plan.hash
    assert found["bytes_moved"] == found["lower_bound"] == plan.num_bytes == plan.target.rank_bytes(0)
    assert found["bytes_over_bound"] == 1.0
    assert found["bytes_moved_per_rank"] == [plan.num_bytes]
    assert found["bytes_sent_per_rank"] == [plan.source_bytes(rank) for rank in range(4)]
    assert found["busiest_sender"] / found["busiest_best"] == found["busiest_over_best"] <= 1.05
    assert (found["num_copies"], found["num_buckets"]) == (plan.num_copies, plan.num_buckets)
    assert found["staging_full_receiver"] == plan.num_bytes
    assert found["staging_bounded_receiver"] == found["staging_bounded_sender"] == 2 * 1048
    assert found["layout_verified"] is True
    assert found["plan_s"] > 0
    assert found["peak_memory_bytes"] > 1 << 20

    text = "\n".join(table)
    for name in (
        "bytes moved, all ranks",
        "busiest sender",
        "staging bounded: receiver",
        "copies",
        "buckets of",
        "planned in",
    ):
        assert name in text
    assert "layout unverified" not in text


def test_colocated_fills_the_devices(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(config), "--train", "tp=2,dp=2", "--infer", "tp=1", "--colocated", "--nodes", "2"]
    assert main([*arguments, "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target_ranks"] == 4
    assert sorted(found["target_devices"]) == [0, 1, 2, 3]
    assert found["bytes_moved"] == found["lower_bound"]
    assert found["bytes_between_nodes"] == 0
    assert 0 < sum(found["bytes_kept_per_rank"]) == 4 * found["receiver_bytes"] - found["bytes_moved"]


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Llama-3-70B", "Qwen3-235B-A22B", "DeepSeek-V3"])
def test_shipped_models_have_their_published_sizes(name: str) -> None:
    """Elements of all tensors, in 1e9, as the models' cards say (DeepSeek-V3 without its extra prediction layer)."""
    published = {"Qwen2.5-7B": 7.616, "Llama-3-70B": 70.554, "Qwen3-235B-A22B": 235.094, "DeepSeek-V3": 671.026}
    tensors = vllm_layout(read_model(name), tp=1).tensors
    assert round(sum(spec.num_elements for spec in tensors.values()) / 1e9, 3) == published[name]
    assert {path.stem for path in MODELS.glob("*.json")} == set(published)


def test_an_unverified_layout_is_called_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = read_model("DeepSeek-V3") | {"num_hidden_layers": 4, "n_routed_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--model", str(tmp_path), "--train", "tp=2", "--infer", "tp=2", "--json"]
    assert main(arguments) == 0
    *table, line = capsys.readouterr().out.splitlines()
    verified = vllm_layout(config, tp=2).verified and megatron_layout(config, tp=2).verified
    assert json.loads(line)["layout_verified"] is verified
    assert ("layout unverified" in "\n".join(table)) is not verified


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train", "tp=3", "--infer", "tp=1"], "cannot be divided evenly by 3"),
        (["--train", "tp=two", "--infer", "tp=1"], "--train: tp must be an integer, got 'two'"),
        (["--train", "tp=1,tp=2", "--infer", "tp=1"], "--train: tp is there twice: 1 and 2"),
        (["--train", "zp=1", "--infer", "tp=1"], "--train: 'zp' is not one of tp, pp, dp"),
        (["--train", "tp=1", "--infer", "tp=1,ep=maybe"], "--infer: ep is on or off, got 'maybe'"),
        (["--train", "tp=1", "--infer", "tp=2", "--colocated"], "1 devices cannot be filled with replicas of 2 ranks"),
        (["--train", "tp=1", "--infer", "tp=1", "--nodes", "3"], "--nodes must be in [1, 2], got 3"),
        (["--train", "tp=1", "--infer", "tp=1", "--bucket-mb", "0"], "--bucket-mb must be > 0, got 0.0"),
        (["--train", "tp=1", "--infer", "tp=1", "--picture", "x.gif"], "x.gif must end in .svg or .png"),
        (["--model", "gpt-9", "--train", "tp=1", "--infer", "tp=1"], "shipped models: DeepSeek-V3, Llama-3-70B"),
    ],
)
def test_bad_input_is_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["--model", str(config), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("plan: ")
    assert message in line


def test_a_config_that_names_a_key_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen2", "hidden_size": 16, "hidden_size": 32}')
    assert main(["--model", str(path), "--train", "tp=1", "--infer", "tp=1"]) == 2
    assert "hidden_size is there twice: 16 and 32" in capsys.readouterr().err


def test_help_needs_nothing_heavy() -> None:
    """Help is there at once: neither torch nor numpy nor rich is imported for it."""
    script = (
        "import sys, engine.plan_command as command\n"
        "try: command.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'vllm', 'megatron', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--colocated" in done.stdout
    assert done.stderr.strip() == "[]"


def test_the_module_runs(config: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "engine.plan", "--model", str(config), "--train", "tp=1"]
    done = subprocess.run(
        [*command, "--infer", "tp=2", "--quiet", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["target_ranks"] == 2


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
@pytest.mark.parametrize("train", ["tp=2,pp=2", "tp=2,dp=16"])  # lines, and a map of pairs above 24 ranks
def test_the_picture_is_drawn(config: Path, tmp_path: Path, train: str, name: str) -> None:
    path = tmp_path / name
    arguments = ["--model", str(config), "--train", train, "--infer", "tp=1", "--quiet", "--picture", str(path)]
    assert main(arguments) == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if name.endswith("png") else b"</svg>" in content


def test_a_picture_without_matplotlib_says_what_to_install(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--model", str(config), "--train", "tp=1", "--infer", "tp=1", "--picture", "plan.svg"]
    assert main(arguments) == 2
    assert "--picture needs matplotlib: pip install 'asyncrl[plot]'" in capsys.readouterr().err
