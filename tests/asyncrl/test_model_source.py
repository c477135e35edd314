"""The initial model: a fresh one that transformers reads, a given one that is linked and checked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file

from asyncrl.model_source import ModelSourceError, fresh_config, inspect_folder, materialize, peek_config
from asyncrl.schema import FreshModel, Model
from asyncrl.tokenizer import EOS_ID, TextTokenizer


def shape(**changes: Any) -> FreshModel:  # noqa: ANN401 - any field
    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 96,
    }  # fmt: skip
    return FreshModel(**(sizes | changes))


@pytest.fixture(scope="module")
def fresh_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialize(Model(fresh=shape()), 0, tmp_path_factory.mktemp("fresh") / "model").folder


@pytest.fixture
def folder(fresh_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of a fresh model that a test may break."""
    return Path(shutil.copytree(fresh_folder, tmp_path / "given"))


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_a_fresh_model(tmp_path: Path, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

    fresh = shape(tie_word_embeddings=tied, rope_theta=5000.0, max_position_embeddings=48)
    info = materialize(Model(fresh=fresh), 0, tmp_path / "model")
    model, loading = AutoModelForCausalLM.from_pretrained(info.folder, output_loading_info=True)
    assert isinstance(model, Qwen2ForCausalLM)
    assert not any(loading.values()), loading
    assert model.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    assert model.config.max_position_embeddings == 48
    assert model.model.layers[0].self_attn.head_dim == fresh.head_dim == 32
    assert info.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert info.stop_token_ids == (EOS_ID,) == (model.generation_config.eos_token_id,)
    assert info.hf_config["vocab_size"] == len(AutoTokenizer.from_pretrained(info.folder)) == 64
    logits = model(torch.tensor([TextTokenizer(info.folder).encode_batch(["c3141>"])[0]])).logits
    assert torch.isfinite(logits).all()


def test_values_depend_on_seed_and_name_only(tmp_path: Path, fresh_folder: Path) -> None:
    np.random.seed(3)  # a global state that must not matter
    again = materialize(Model(fresh=shape()), 0, tmp_path / "again").folder
    other = materialize(Model(fresh=shape()), 1, tmp_path / "other").folder
    deeper = materialize(Model(fresh=shape(num_hidden_layers=3)), 0, tmp_path / "deeper").folder
    assert (again / "model.safetensors").read_bytes() == (fresh_folder / "model.safetensors").read_bytes()
    first, second, third = (load_file(path / "model.safetensors") for path in (fresh_folder, other, deeper))
    for name, tensor in first.items():
        assert np.array_equal(third[name], tensor), name
        if name.endswith(("norm.weight", "bias")):
            assert set(np.unique(tensor)) == {float(name.endswith("weight"))}
        else:
            assert not np.array_equal(second[name], tensor), name
            assert abs(tensor.std() - 0.02) < 0.001, name
            assert abs(tensor.mean()) < 0.001, name

    weights = [tensor for name, tensor in first.items() if tensor.ndim == 2]
    assert len({tensor.tobytes() for tensor in weights}) == len(weights)


def test_a_given_folder_is_linked_without_code_and_pickles(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling_mine.py").write_text("raise RuntimeError")
    info = materialize(Model(path=str(folder)), 0, tmp_path / "model")
    assert sorted(file.name for file in info.folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (info.folder / "model.safetensors").resolve() == folder / "model.safetensors"
    assert inspect_folder(info.folder) == info


def test_a_relative_folder_is_linked_for_good(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    info = materialize(Model(path=folder.name), 0, tmp_path / "model")
    monkeypatch.chdir("/")
    assert (info.folder / "config.json").is_file()


def test_shards_are_found_through_their_index(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)

    weight_map = {name: file for file, part in shards.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    info = materialize(Model(path=str(folder)), 0, tmp_path / "model")
    assert {*shards, index.name} <= {file.name for file in info.folder.iterdir()}

    (folder / "model-2.safetensors").unlink()
    with pytest.raises(
        ModelSourceError, match=r"model-2.safetensors: missing, but named in model.safetensors.index.js"
    ):
        materialize(Model(path=str(folder)), 0, tmp_path / "broken")

    index.write_text(json.dumps({"weight_map": {"a": "../model-1.safetensors"}}))
    with pytest.raises(ModelSourceError, match=r"no weight_map from tensors to files of the same folder"):
        materialize(Model(path=str(folder)), 0, tmp_path / "broken")


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def add_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.extra": np.zeros(1, np.float32)}, folder / "model.safetensors")


def cut_file(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def overwrite(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return write


def both(*damages: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "architecture": (
        config(architectures=["LlamaForCausalLM"]),
        r"config.json: architectures = \['LlamaForCausalLM'\]: only Qwen2ForCausalLM for now$",
    ),
    "no architecture": (config(architectures=None), r"architectures = None: only Qwen2ForCausalLM for now$"),
    "family": (config(model_type="qwen3"), r'model_type = "qwen3": not supported, the trainer would not apply it$'),
    "size": (config(vocab_size="64"), r"config.json: vocab_size = 64: must be a whole number >= 1$"),
    "rope": (
        config(rope_scaling={"type": "yarn", "factor": 4.0}),
        r'rope_parameters = {"type": "yarn", "factor": 4.0}: not supported, the trainer would not apply it$',
    ),
    "window": (config(use_sliding_window=True), r"use_sliding_window = true: not supported"),
    "quantized": (config(quantization_config={"bits": 4}), r'quantization_config = {"bits": 4}: not supported'),
    "activation": (config(hidden_act="gelu"), r'hidden_act = "gelu": not supported'),
    "no stop": (
        both(config(eos_token_id=None), drop("generation_config.json")),
        r"no eos_token_id in generation_config.json or config.json$",
    ),
    "no config": (drop("config.json"), r"config.json: missing$"),
    "config": (overwrite("{"), r"config.json: not JSON: "),
    "list": (overwrite("[]"), r"config.json: must hold a JSON object$"),
    "no weights": (
        drop("model.safetensors"),
        r"neither model.safetensors nor model.safetensors.index.json; pickled weights are not loaded$",
    ),
    "missing tensor": (drop_tensor, r"tensor model.norm.weight is missing, config.json asks for \[64\]$"),
    "extra tensor": (add_tensor, r"1 tensors that the architecture lacks, model.extra for one$"),
    "wrong shape": (
        config(intermediate_size=128),
        r"tensor model.layers.0.mlp.gate_proj.weight has the shape \[96, 64\], config.json asks for \[128, 64\]$",
    ),
    "cut file": (cut_file, r"model.safetensors: not a whole safetensors file: "),
    "no tokenizer": (drop("tokenizer.json"), r"has no tokenizer.json: only fast tokenizers are supported$"),
    "small vocabulary": (config(vocab_size=32), r"tensor model.embed_tokens.weight has the shape \[64, 64\]"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_model_that_cannot_be_trained_is_one_line(case: str, folder: Path, tmp_path: Path) -> None:
    damage, message = BROKEN[case]
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        materialize(Model(path=str(folder)), 0, tmp_path / "model")

    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given"]  # nothing half-written is left


def test_more_tokens_than_the_model_has_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: tensors[name][:32]}, folder / "model.safetensors")
    edit_json(folder / "config.json", vocab_size=32)
    with pytest.raises(ModelSourceError, match=r"the tokenizer has 64 tokens, config.json's vocab_size is only 32$"):
        materialize(Model(path=str(folder)), 0, tmp_path / "model")


def test_a_tied_model_may_carry_its_output_layer_too(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    assert materialize(Model(path=str(folder)), 0, tmp_path / "model").num_parameters == sum(
        tensor.size for name, tensor in tensors.items() if name != "lm_head.weight"
    )


def test_several_end_tokens(folder: Path, tmp_path: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[2, 5])
    assert materialize(Model(path=str(folder)), 0, tmp_path / "model").stop_token_ids == (2, 5)
    (folder / "generation_config.json").unlink()
    assert inspect_folder(folder).stop_token_ids == (EOS_ID,)


def test_the_initial_model_is_written_once(fresh_folder: Path) -> None:
    with pytest.raises(FileExistsError, match="writes its initial model once"):
        materialize(Model(fresh=shape()), 1, fresh_folder)


def test_what_is_no_folder_and_no_hub_id_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("nowhere", "/nowhere/at/all", "a/b/c", "../model"):
        with pytest.raises(ModelSourceError, match=r"^no folder /.*, and not a hub id \(owner/name\)$"):
            peek_config(Model(path=path))

        with pytest.raises(ModelSourceError, match=r"^no folder /.*, and not a hub id \(owner/name\)$"):
            materialize(Model(path=path), 0, tmp_path / "model")


def test_a_hub_id_is_asked_for_what_is_linked_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert peek_config(Model(path="owner/name")) is None
    info = materialize(Model(path="owner/name", revision="v1"), 0, tmp_path / "model")
    ((repo_id, revision, patterns),) = asked
    assert (repo_id, revision) == ("owner/name", "v1")
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in patterns)
    assert info.num_parameters > 0


def test_a_hub_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **_: object) -> str:
        raise LocalEntryNotFoundError(f"Cannot find {repo_id} in the cache.\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ModelSourceError, match=r"^no folder .*, and the hub gave no owner/name: Cannot find") as caught:
        materialize(Model(path="owner/name"), 0, tmp_path / "model")

    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_revision_of_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"^model.revision = v1: .* is a folder and has no revisions$"):
        materialize(Model(path=str(folder), revision="v1"), 0, tmp_path / "model")


def test_peek_config_is_what_is_written(fresh_folder: Path) -> None:
    written = json.loads((fresh_folder / "config.json").read_text())
    assert peek_config(Model(fresh=shape())) == fresh_config(shape()) == written
    assert peek_config(Model(path=str(fresh_folder))) == written


def test_the_driver_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from asyncrl.model_source import materialize; "
        "from asyncrl.schema import FreshModel, Model; "
        "fresh = FreshModel(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, "
        "intermediate_size=64); "
        f"materialize(Model(fresh=fresh), 0, Path({str(tmp_path / 'model')!r})); "
        "print(sorted({'torch', 'transformers', 'ray', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
