"""The initial model, written once as a Hugging Face folder that both sides load. numpy and safetensors only, no torch.

A fresh model is drawn here; a given one is linked, never copied: config, safetensors and tokenizer, nothing that could
hold code or pickles.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from asyncrl.schema import CHAR_VOCAB_SIZE, FreshModel, Model
from asyncrl.tokenizer import BOS_ID, EOS_ID, PAD_ID, TOKENIZER_FILES, TextTokenizer, char_tokenizer_folder
from asyncrl.user_error import UserError
from engine.families import canonical_layout
from engine.layout import LayoutError
from engine.seeds import Purpose, derive_seed

if TYPE_CHECKING:
    from engine.layout import Layout

ARCHITECTURES = ("Qwen2ForCausalLM",)
TRAINED_FAMILIES = ("qwen2",)  # the resharding engine has layouts of more than the trainer builds
_INDEX_FILE = "model.safetensors.index.json"
_WEIGHTS_FILE = "model.safetensors"
_INITIALIZER_RANGE = 0.02  # transformers' default for the family: normal(0, 0.02) weights, zero biases, norms of one
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


class ModelSourceError(UserError):
    """The model cannot be had or is not one that can be trained; one line that names file and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A Hugging Face folder that has been checked.

    Attributes:
        folder: config.json, safetensors, generation_config.json where there is one, tokenizer.
        hf_config: the content of config.json.
        num_parameters: elements of all tensors, tied ones counted once.
        stop_token_ids: a response ends with one of these.
    """

    folder: Path
    hf_config: Mapping[str, Any]
    num_parameters: int
    stop_token_ids: tuple[int, ...]


def materialize(model: Model, seed: int, folder: Path) -> ModelInfo:
    """Write or link the recipe's model into `folder`, which appears at once or not at all.

    Args:
        model: the recipe's section; exactly one of path and fresh is set.
        seed: the run's seed; a fresh model depends on nothing else.
        folder: must not exist yet; its parent must.

    Raises:
        ModelSourceError: no such folder or hub id, a missing file or tensor, an architecture that is not supported.
        FileExistsError: `folder` is there already.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: a run writes its initial model once")

    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    work.mkdir(mode=0o700)
    try:
        if model.fresh is not None:
            _write_fresh(model.fresh, seed, work)
        else:
            assert model.path is not None
            source = _find_folder(model.path, model.revision)
            inspect_folder(source)  # before it is linked, so that messages name the user's own files
            _link(source, work)

        info = inspect_folder(work)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work)
        raise

    return replace(info, folder=folder)


def inspect_folder(folder: Path) -> ModelInfo:
    """Check a Hugging Face folder, the headers of its safetensors included, and say what is in it.

    Raises:
        ModelSourceError: see `materialize`.
    """
    config = _read_config(folder)
    try:
        layout = canonical_layout(config, dtype="float32")
    except LayoutError as error:
        raise ModelSourceError(f"{folder}: {error}") from error

    _check_tensors(folder, layout)
    tokenizer = TextTokenizer(folder)
    if tokenizer.vocab_size > config["vocab_size"]:
        raise ModelSourceError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, config.json's vocab_size is only "
            f"{config['vocab_size']}"
        )

    return ModelInfo(
        folder=folder,
        hf_config=MappingProxyType(config),
        num_parameters=sum(spec.num_elements for spec in layout.tensors.values()),
        stop_token_ids=_stop_token_ids(folder, config),
    )


def peek_config(model: Model) -> Mapping[str, Any] | None:
    """Return the content of the model's config.json as far as it can be known without a download, else None.

    Raises:
        ModelSourceError: `path` is a folder whose model is not supported, or neither a folder nor a hub id.
    """
    if model.fresh is not None:
        return fresh_config(model.fresh)

    assert model.path is not None
    if Path(model.path).is_dir():
        return _read_config(Path(model.path))

    if _HUB_ID.fullmatch(model.path):
        return None

    raise ModelSourceError(f"no folder {Path(model.path).absolute()}, and not a hub id (owner/name)")


def fresh_config(fresh: FreshModel) -> dict[str, Any]:
    """Return the config.json of a fresh model; every version of transformers reads it."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": fresh.family,
        "vocab_size": CHAR_VOCAB_SIZE,
        "hidden_size": fresh.hidden_size,
        "intermediate_size": fresh.intermediate_size,
        "num_hidden_layers": fresh.num_hidden_layers,
        "num_attention_heads": fresh.num_attention_heads,
        "num_key_value_heads": fresh.num_key_value_heads,
        "max_position_embeddings": fresh.max_position_embeddings,
        "rope_theta": fresh.rope_theta,
        "tie_word_embeddings": fresh.tie_word_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": _INITIALIZER_RANGE,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "use_cache": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
    }


def _write_fresh(fresh: FreshModel, seed: int, folder: Path) -> None:
    """Draw every tensor from a stream of its own name: values depend on seed and name, not on order or global state."""
    import numpy as np
    from safetensors.numpy import save_file

    config = fresh_config(fresh)
    tensors = {}
    for name, spec in canonical_layout(config, dtype="float32").tensors.items():
        if name.endswith(".bias"):
            tensors[name] = np.zeros(spec.shape, np.float32)
        elif len(spec.shape) == 1:
            tensors[name] = np.ones(spec.shape, np.float32)
        else:
            random = np.random.Generator(np.random.PCG64(derive_seed(seed, Purpose.PARAMETER_INIT, name)))
            tensors[name] = random.standard_normal(spec.shape, np.float32) * np.float32(_INITIALIZER_RANGE)

    save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    for file in char_tokenizer_folder().iterdir():
        shutil.copyfile(file, folder / file.name)


def _find_folder(path: str, revision: str | None) -> Path:
    """Return the local folder of a path or of a hub id, which is downloaded if need be."""
    if Path(path).is_dir():
        if revision is not None:
            raise ModelSourceError(f"model.revision = {revision}: {path} is a folder and has no revisions")

        return Path(path).absolute()

    if not _HUB_ID.fullmatch(path):
        raise ModelSourceError(f"no folder {Path(path).absolute()}, and not a hub id (owner/name)")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["config.json", "generation_config.json", "*.safetensors", _INDEX_FILE, *TOKENIZER_FILES]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelSourceError(f"no folder {Path(path).absolute()}, and the hub gave no {path}: {reason}") from error


def _link(source: Path, folder: Path) -> None:
    """Link what a model consists of; anything else (code, pickles) stays behind."""
    names = ["config.json", "generation_config.json", *TOKENIZER_FILES, *_weight_files(source)]
    if (source / _INDEX_FILE).is_file():
        names.append(_INDEX_FILE)

    for name in dict.fromkeys(names):
        if (source / name).is_file():
            (folder / name).symlink_to((source / name).resolve())


def _read_config(folder: Path) -> dict[str, Any]:
    """Read config.json and refuse what the trainer would compute differently or not at all."""
    file = folder / "config.json"
    config = _read_json(file)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise ModelSourceError(f"{file}: architectures = {architectures}: only {', '.join(ARCHITECTURES)} for now")

    for key in _SIZES:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ModelSourceError(f"{file}: {key} = {config.get(key)}: must be a whole number >= 1")

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    refused = {
        "model_type": config.get("model_type") not in TRAINED_FAMILIES,
        "quantization_config": config.get("quantization_config") is not None,
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "rope_parameters": rope.get("rope_type", rope.get("type", "default")) != "default",
    }
    for key, is_refused in refused.items():
        if is_refused:
            value = rope if key == "rope_parameters" else config.get(key)
            raise ModelSourceError(
                f"{file}: {key} = {json.dumps(value)}: not supported, the trainer would not apply it"
            )

    return config


def _check_tensors(folder: Path, layout: Layout) -> None:
    """Compare the headers of the safetensors with what the family must have; no tensor is read."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for name in _weight_files(folder):
        file = folder / name
        if not file.is_file():
            raise ModelSourceError(f"{file}: missing, but named in {_INDEX_FILE}")

        try:
            with safe_open(file, framework="numpy") as opened:
                shapes.update({key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ModelSourceError(f"{file}: not a whole safetensors file: {error}") from None

    for name, spec in layout.tensors.items():
        if shapes.get(name) != spec.shape:
            found = f"has the shape {list(shapes[name])}" if name in shapes else "is missing"
            raise ModelSourceError(f"{folder}: tensor {name} {found}, config.json asks for {list(spec.shape)}")

    extra = sorted(shapes.keys() - layout.tensors.keys() - layout.tied.keys())
    if extra:
        raise ModelSourceError(f"{folder}: {len(extra)} tensors that the architecture lacks, {extra[0]} for one")


def _weight_files(folder: Path) -> Sequence[str]:
    """Return the names of the safetensors, from the index or the single file."""
    if (folder / _INDEX_FILE).is_file():
        weight_map = _read_json(folder / _INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_plain_name(name) for name in weight_map.values()):
            raise ModelSourceError(f"{folder / _INDEX_FILE}: no weight_map from tensors to files of the same folder")

        return sorted(set(weight_map.values()))

    if not (folder / _WEIGHTS_FILE).is_file():
        raise ModelSourceError(f"{folder}: neither {_WEIGHTS_FILE} nor {_INDEX_FILE}; pickled weights are not loaded")

    return [_WEIGHTS_FILE]


def _is_plain_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _stop_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return generation_config.json's end tokens, or else config.json's."""
    file = folder / "generation_config.json"
    found = _read_json(file).get("eos_token_id") if file.is_file() else None
    found = found if found is not None else config.get("eos_token_id")
    ids = tuple(found) if isinstance(found, list) else (found,)
    if not all(isinstance(index, int) for index in ids) or not ids:
        raise ModelSourceError(f"{folder}: no eos_token_id in generation_config.json or config.json")

    return ids


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelSourceError(f"{file}: missing") from None
    except ValueError as error:
        raise ModelSourceError(f"{file}: not JSON: {error}") from None

    if not isinstance(content, dict):
        raise ModelSourceError(f"{file}: must hold a JSON object")

    return content
