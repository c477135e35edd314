"""A step after a resume is bitwise that of the uninterrupted run; an export is a model for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from engine.workers import WorkerError
from trainers.types import Batch, OptimizerSpec

if TYPE_CHECKING:
    from tests.trainers.conftest import Arrays, Batches, RunningTrainer, StartTrainer

_PLAIN = OptimizerSpec(lr=1e-2, weight_decay=0.1, clip_grad=0.5, distributed=False)
_DISTRIBUTED = OptimizerSpec(lr=1e-2, weight_decay=0.1, clip_grad=0.5)


def _batches(batches: Batches, dp: int, num_steps: int) -> list[Batch]:
    return [
        batches.batch(step, [[batches.micro(5, 8, 3), batches.micro(9)] for _ in range(dp)])
        for step in range(num_steps)
    ]


def _train(trainer: RunningTrainer, work: list[Batch]) -> tuple[list[tuple[float, float]], Arrays]:
    results = [trainer.step(batch) for batch in work]
    weights = trainer.canonical(trainer.probe("weights"))
    return [(result.loss, result.grad_norm) for result in results], weights


def _assert_bitwise(found: Arrays, expected: Arrays) -> None:
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": _DISTRIBUTED},
        {"optimizer": _PLAIN},
        {"optimizer": _DISTRIBUTED, "dp": 2},
        {"optimizer": _DISTRIBUTED, "tp": 2},
        {"optimizer": _DISTRIBUTED, "pp": 2},
        {"optimizer": _DISTRIBUTED, "dp": 2, "dtype": "bfloat16"},
        {"optimizer": _PLAIN, "dtype": "bfloat16"},
        pytest.param({"optimizer": _DISTRIBUTED, "dp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param({"optimizer": _DISTRIBUTED, "tp": 2, "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=["distributed", "plain", "dp2", "tp2", "pp2", "dp2-bfloat16", "plain-bfloat16", "dp2-pp2", "tp2-pp2"],
)
def test_resumed_steps_are_bitwise_those_of_the_uninterrupted_run(
    start_trainer: StartTrainer, batches: Batches, tmp_path: Path, fields: dict[str, object]
) -> None:
    work = _batches(batches, dp=int(str(fields.get("dp", 1))), num_steps=5)
    trainer = start_trainer(**fields)
    _train(trainer, work[:3])
    trainer.run("save", str(tmp_path))
    expected = _train(trainer, work[3:])  # saving must not disturb the run that goes on, see below

    resumed = start_trainer(**fields)
    resumed.run("load", str(tmp_path))
    found = _train(resumed, work[3:])
    assert found[0] == expected[0]
    _assert_bitwise(found[1], expected[1])


def test_saving_changes_nothing(start_trainer: StartTrainer, batches: Batches, tmp_path: Path) -> None:
    work = _batches(batches, dp=1, num_steps=4)
    expected = _train(start_trainer(), work)
    trainer = start_trainer()
    results = _train(trainer, work[:2])[0]
    trainer.run("save", str(tmp_path))
    more, weights = _train(trainer, work[2:])
    assert results + more == expected[0]
    _assert_bitwise(weights, expected[1])


def test_a_checkpoint_from_before_the_first_step_loads(
    start_trainer: StartTrainer, batches: Batches, tmp_path: Path
) -> None:
    work = _batches(batches, dp=1, num_steps=2)
    trainer = start_trainer()
    trainer.run("save", str(tmp_path))
    expected = _train(trainer, work)
    resumed = start_trainer()
    resumed.run("load", str(tmp_path))
    found = _train(resumed, work)
    assert found[0] == expected[0]
    _assert_bitwise(found[1], expected[1])


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_checkpoint_loads_in_another_layout(
    start_trainer: StartTrainer, batches: Batches, tmp_path: Path, sizes: dict[str, int]
) -> None:
    """Weights bitwise; the steps that follow as close as the layouts are to each other."""
    work = _batches(batches, dp=1, num_steps=4)
    trainer = start_trainer()
    _, saved = _train(trainer, work[:2])
    trainer.run("save", str(tmp_path))
    expected, _ = _train(trainer, work[2:])

    other = start_trainer(**sizes)
    other.run("load", str(tmp_path))
    _assert_bitwise(other.canonical(other.probe("weights")), saved)
    if "dp" in sizes:
        shares = [[tuple(batch.micro_batches[0][i : i + 1]) for i in range(2)] for batch in work]
        work = [
            Batch(step=batch.step, micro_batches=tuple(own), num_loss_tokens=batch.num_loss_tokens, oldest_version=None)
            for batch, own in zip(work, shares, strict=True)
        ]
    found, _ = _train(other, work[2:])
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_hyperparameters_are_the_spec_s_after_a_load(
    start_trainer: StartTrainer, batches: Batches, tmp_path: Path
) -> None:
    trainer = start_trainer()
    _train(trainer, _batches(batches, dp=1, num_steps=1))
    (groups,) = trainer.probe("hyperparameters")
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}, "biases and norms are not decayed"
    trainer.run("save", str(tmp_path))
    changed = start_trainer(optimizer=OptimizerSpec(lr=1e-3, betas=(0.8, 0.9), weight_decay=0.0))
    changed.run("load", str(tmp_path))
    (groups,) = changed.probe("hyperparameters")
    assert {group["betas"] for group in groups} == {(0.8, 0.9)}
    assert {group["weight_decay"] for group in groups} == {0.0}


def test_a_folder_without_a_checkpoint_is_refused(start_trainer: StartTrainer, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="holds no complete Megatron checkpoint"):
        start_trainer().run("load", str(tmp_path))


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_an_export_opens_in_transformers(
    start_trainer: StartTrainer,
    batches: Batches,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    model: str,
    sizes: dict[str, int],
) -> None:
    source: Path = request.getfixturevalue(f"{model}_model")
    trainer = start_trainer(model_dir=str(source), **sizes)
    _, weights = _train(trainer, _batches(batches, dp=sizes.get("dp", 1), num_steps=1))
    trainer.run("export", str(tmp_path))

    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.dtype == torch.float32
    exported = dict(opened.named_parameters())
    assert set(exported) == set(weights)
    for name, weight in weights.items():
        np.testing.assert_array_equal(exported[name].detach().numpy(), weight, err_msg=name)

    micro = batches.micro(10)
    logits = np.concatenate(trainer.probe("logits", micro), axis=1) if "pp" not in sizes else None
    if logits is not None:
        wanted = opened(torch.from_numpy(micro.token_ids)[None]).logits[0].detach().numpy()
        np.testing.assert_allclose(logits[: len(wanted), : wanted.shape[1]][: len(wanted)], wanted, atol=1e-4)

    assert (tmp_path / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()


def test_an_untrained_export_is_bitwise_the_source(
    start_trainer: StartTrainer, tied_model: Path, tmp_path: Path
) -> None:
    start_trainer(tp=2).run("export", str(tmp_path))
    with safe_open(tied_model / "model.safetensors", "pt") as a, safe_open(tmp_path / "model.safetensors", "pt") as b:
        assert sorted(a.keys()) == sorted(b.keys())
        assert all(torch.equal(a.get_tensor(name), b.get_tensor(name)) for name in a.keys())  # noqa: SIM118
    source, exported = (json.loads((folder / "config.json").read_text()) for folder in (tied_model, tmp_path))
    assert exported == source


def test_an_export_can_be_cast(start_trainer: StartTrainer, tied_model: Path, tmp_path: Path) -> None:
    start_trainer().run("export", str(tmp_path), dtype="bfloat16")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    source = transformers.AutoModelForCausalLM.from_pretrained(tied_model)
    assert opened.dtype == torch.bfloat16
    assert torch.equal(opened.model.norm.weight, source.model.norm.weight.bfloat16())


def test_a_large_export_is_split_into_files(tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hugging Face does: numbered files and an index; one rank needs no other process."""
    from engine.families import megatron_layout
    from trainers import megatron_export
    from trainers.megatron_model import load_weights

    config = json.loads((tied_model / "config.json").read_text())
    layout = megatron_layout(config, tp=1, pp=1, dp=1)
    parameters = {name: torch.empty(spec.shape) for name, spec in layout.params[0].items()}
    load_weights(parameters, layout, 0, tied_model)
    monkeypatch.setattr(megatron_export, "_MAX_FILE_BYTES", 20_000)
    megatron_export.export(parameters, layout, 0, tied_model, tmp_path, "float32")

    assert len(list(tmp_path.glob("model-0000?-of-0000?.safetensors"))) > 2
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    source = transformers.AutoModelForCausalLM.from_pretrained(tied_model)
    assert all(torch.equal(a, b) for a, b in zip(opened.parameters(), source.parameters(), strict=True))

    again = {name: torch.full(spec.shape, torch.nan) for name, spec in layout.params[0].items()}
    load_weights(again, layout, 0, tmp_path)  # and back, from several files
    assert all(torch.equal(again[name], parameters[name]) for name in parameters)


def test_a_missing_tensor_is_named(tied_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from engine.families import megatron_layout
    from trainers.megatron_model import load_weights

    layout = megatron_layout(json.loads((tied_model / "config.json").read_text()), tp=1, pp=1, dp=1)
    parameters = {name: torch.empty(spec.shape) for name, spec in layout.params[0].items()}
    tensors = load_file(tied_model / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model\.norm\.weight"):
        load_weights(parameters, layout, 0, tmp_path)
    save_file(tensors | {"model.norm.weight": norm[:-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(31,\), but config\.json says \(32,\)"):
        load_weights(parameters, layout, 0, tmp_path)
