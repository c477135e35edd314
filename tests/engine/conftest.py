"""A tiny Qwen2 on any training and generator layout, published through shared memory within one process.

The tensors of both sides are cut here by gather-then-slice, with torch's own reshape, cat and chunk: a reference that
shares no code with the layouts under test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from engine.families import megatron_layout, vllm_layout
from engine.plan import Plan, make_plan
from engine.receiver import Receiver
from engine.snapshot import SnapshotWriter
from engine.types import Manifest, WeightVersion

Tensors = dict[str, torch.Tensor]
HfConfig = Mapping[str, Any]
RunProbe = Callable[[Path, Mapping[str, Any]], dict[str, list[str]]]
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def qwen2_config(**changes: object) -> dict[str, Any]:
    """A config.json with 4 query heads, 2 key heads and a vocabulary that no side leaves unpadded."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 37,
        "tie_word_embeddings": True,
    }
    return config | changes


def hf_tensors(config: HfConfig, seed: int) -> Tensors:
    """Random canonical tensors, float32."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {prefix + f"mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {prefix + "mlp.down_proj.weight": (hidden, ffn), prefix + "self_attn.o_proj.weight": (hidden, q)}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[prefix + f"self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[prefix + f"self_attn.{name}_proj.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)

    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    return F.pad(tensor, (0, 0, 0, -len(tensor) % multiple))


def megatron_reference(hf: Tensors, config: HfConfig, *, tp: int, pp: int, dp: int) -> list[Tensors]:
    """Parameters of every Megatron rank, in the order "tp-dp-pp"."""
    groups = config["num_key_value_heads"]
    per_stage = config["num_hidden_layers"] // pp
    ranks: list[Tensors] = []
    for stage, _, part in ((stage, data, part) for stage in range(pp) for data in range(dp) for part in range(tp)):
        params: Tensors = {}
        vocabulary = {name: _padded(hf[name], tp).chunk(tp)[part] for name in _VOCABULARY if name in hf}
        if stage == 0:
            params["embedding.word_embeddings.weight"] = vocabulary["model.embed_tokens.weight"]

        if stage == pp - 1:
            params["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            head = vocabulary.get("lm_head.weight")
            if head is not None or pp > 1:
                params["output_layer.weight"] = vocabulary["model.embed_tokens.weight"] if head is None else head

        for local in range(per_stage):
            source, target = f"model.layers.{stage * per_stage + local}.", f"decoder.layers.{local}."
            for kind in ("weight", "bias"):
                heads = [hf[f"{source}self_attn.{name}_proj.{kind}"] for name in "qkv"]
                blocks = [tensor.reshape(groups, len(tensor) // groups, -1) for tensor in heads]
                fused = torch.cat(blocks, 1).reshape(sum(map(len, heads)), *heads[0].shape[1:])
                params[f"{target}self_attention.linear_qkv.{kind}"] = fused.chunk(tp)[part]
            gate, up = (hf[f"{source}mlp.{name}_proj.weight"].chunk(tp)[part] for name in ("gate", "up"))
            params[target + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
            params[target + "mlp.linear_fc2.weight"] = hf[source + "mlp.down_proj.weight"].chunk(tp, 1)[part]
            params[target + "self_attention.linear_proj.weight"] = hf[source + "self_attn.o_proj.weight"].chunk(tp, 1)[
                part
            ]
            params[target + "input_layernorm.weight"] = hf[source + "input_layernorm.weight"]
            params[target + "pre_mlp_layernorm.weight"] = hf[source + "post_attention_layernorm.weight"]
        ranks.append({name: tensor.clone() for name, tensor in params.items()})
    return ranks


def vllm_reference(hf: Tensors, config: HfConfig, *, tp: int) -> list[Tensors]:
    """Parameters of every rank of one vLLM replica."""
    groups = config["num_key_value_heads"]
    ranks: list[Tensors] = []
    for part in range(tp):
        params = {"model.norm.weight": hf["model.norm.weight"]}
        params |= {name: _padded(hf[name], 64).chunk(tp)[part] for name in _VOCABULARY if name in hf}

        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            for kind in ("weight", "bias"):
                query, *keys = [hf[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
                copies = [
                    tensor.unflatten(0, (groups, -1)).repeat_interleave(max(tp // groups, 1), 0) for tensor in keys
                ]
                kv = [tensor.chunk(tp)[part].flatten(0, 1) for tensor in copies]
                params[f"{prefix}self_attn.qkv_proj.{kind}"] = torch.cat([query.chunk(tp)[part], *kv])
            halves = [hf[f"{prefix}mlp.{name}_proj.weight"].chunk(tp)[part] for name in ("gate", "up")]
            params[prefix + "mlp.gate_up_proj.weight"] = torch.cat(halves)
            for name in ("mlp.down_proj.weight", "self_attn.o_proj.weight"):
                params[prefix + name] = hf[prefix + name].chunk(tp, 1)[part]
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                params[prefix + name] = hf[prefix + name]
        ranks.append({name: tensor.clone() for name, tensor in params.items()})
    return ranks


@dataclass(kw_only=True)
class World:
    """Training ranks, a store and the ranks of one replica. Target parameters start as NaN."""

    folder: Path
    config: HfConfig = field(default_factory=qwen2_config)
    tp: int = 1
    pp: int = 1
    dp: int = 1
    target_tp: int = 1
    bucket_bytes: int = 1 << 20
    target_dtype: str = "float32"
    num_slots: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        source = megatron_layout(self.config, tp=self.tp, pp=self.pp, dp=self.dp, dtype="float32")
        target = vllm_layout(self.config, tp=self.target_tp, dtype=self.target_dtype)
        self.plan: Plan = make_plan(source, target, bucket_bytes=self.bucket_bytes)
        self.sources = self.source_reference(self.seed)
        self.targets: list[Tensors] = [
            {name: torch.full(spec.shape, torch.nan, dtype=getattr(torch, spec.dtype)) for name, spec in rank.items()}
            for rank in target.params
        ]
        self.writers: list[SnapshotWriter] = []
        self.receivers: list[Receiver] = []
        for rank, params in enumerate(self.sources):
            self.writers.append(SnapshotWriter(self.plan, rank, params, self.folder, self.num_slots))
        for rank, params in enumerate(self.targets):
            self.receivers.append(Receiver(self.plan, rank, params, self.folder, self.num_slots))

    def source_reference(self, seed: int) -> list[Tensors]:
        """What the training ranks hold with the weights of `seed`."""
        return megatron_reference(hf_tensors(self.config, seed), self.config, tp=self.tp, pp=self.pp, dp=self.dp)

    def target_reference(self, seed: int) -> list[Tensors]:
        """What the replica must hold after a publish of the weights of `seed`."""
        dtype = getattr(torch, self.target_dtype)
        ranks = vllm_reference(hf_tensors(self.config, seed), self.config, tp=self.target_tp)
        return [{name: tensor.to(dtype) for name, tensor in rank.items()} for rank in ranks]

    def train(self, seed: int) -> None:
        """Change the training ranks' weights in place, as an optimizer does."""
        for params, wanted in zip(self.sources, self.source_reference(seed), strict=True):
            for name, tensor in params.items():
                tensor.copy_(wanted[name])

    def write(self, version: int, *, slot: int, epoch: int = 0) -> Manifest:
        """Snapshot all training ranks."""
        digests: dict[int, str] = {}
        for writer in self.writers:
            digests |= writer.write(version, epoch, slot)
        number = WeightVersion(version)
        return Manifest(
            epoch=epoch,
            version=number,
            written_version=number,
            plan_hash=self.plan.hash,
            slot=slot,
            digests=digests,
        )

    def flip(self, manifest: Manifest) -> None:
        """Bring the replica to a version, in two phases."""
        for receiver in self.receivers:
            receiver.prepare(manifest)
        for receiver in self.receivers:
            receiver.apply(manifest)

    def target_holds(self, seed: int) -> bool:
        """Whether every parameter of the replica, padding included, is bitwise that of the weights of `seed`."""
        return all(
            params.keys() == wanted.keys() and all(torch.equal(params[name], wanted[name]) for name in wanted)
            for params, wanted in zip(self.targets, self.target_reference(seed), strict=True)
        )

    def close(self) -> None:
        """Unmap and unlink everything."""
        for receiver in self.receivers:
            receiver.close()
        for writer in self.writers:
            writer.close()


class References(NamedTuple):
    """Canonical tensors and the two functions that cut them."""

    hf: Tensors
    megatron: Callable[..., list[Tensors]]
    vllm: Callable[..., list[Tensors]]


@pytest.fixture(scope="session")
def references() -> Callable[[HfConfig, int], References]:
    """`references(config, seed).megatron(tp=2, pp=1, dp=1)`, for tests that need no `World`."""

    def make(config: HfConfig, seed: int) -> References:
        hf = hf_tensors(config, seed)
        return References(hf, partial(megatron_reference, hf, config), partial(vllm_reference, hf, config))

    return make


@pytest.fixture(scope="session")
def make_config() -> Callable[..., dict[str, Any]]:
    """`qwen2_config` for tests: a config.json with changes."""
    return qwen2_config


@pytest.fixture(scope="session")
def build_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., World]:
    """`build_world(tp=2, ...)` gives a `World` in a new private folder; the caller closes it."""

    def build(**sizes: Any) -> World:  # noqa: ANN401 - World's own fields
        folder = tmp_path_factory.mktemp("segments")
        folder.chmod(0o700)
        return World(folder=folder, **sizes)

    return build


@pytest.fixture
def make_world(build_world: Callable[..., World]) -> Iterator[Callable[..., World]]:
    """`build_world` whose worlds are closed after the test."""
    worlds: list[World] = []

    def make(**sizes: Any) -> World:  # noqa: ANN401 - World's own fields
        worlds.append(build_world(**sizes))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(scope="module")
def run_probe(tmp_path_factory: pytest.TempPathFactory) -> RunProbe:
    """`run_probe(script, cases)`: a script in a process of its own says, from JSON to JSON, what differs by case."""

    def run(script: Path, cases: Mapping[str, Any]) -> dict[str, list[str]]:
        folder = tmp_path_factory.mktemp("probe")
        (folder / "cases.json").write_text(json.dumps(cases))
        done = subprocess.run(
            [sys.executable, str(script), str(folder / "cases.json"), str(folder / "results.json")],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout[-5000:]
        results: dict[str, list[str]] = json.loads((folder / "results.json").read_text())
        return results

    return run
