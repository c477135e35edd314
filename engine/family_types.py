"""What a row of a family's table says: which canonical tensors a parameter is made of, its names, how it is cut.

The tables themselves are in `family_tables.py`. Nothing else in the engine asks for a family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

HfConfig = Mapping[str, Any]
"""A parsed Hugging Face `config.json`."""


class Cut(StrEnum):
    """How a parameter is spread over tensor-parallel ranks."""

    REPLICATED = "replicated"  # every rank holds it whole; several tensors lie under one another
    ROWS = "rows"  # each tensor in equal parts of dim 0, a rank's parts under one another (gate, up)
    COLUMNS = "columns"  # equal parts of dim 1 (Megatron's row-parallel linear: the input dim)
    VOCABULARY = "vocabulary"  # equal parts of dim 0, after padding it to a multiple that the side chooses
    QKV = "qkv"  # whole heads of dim 0; the order differs between the sides


class Place(StrEnum):
    """Which pipeline stages hold a parameter."""

    FIRST = "first"
    LAYER = "layer"  # the stage of its layer; names contain `{layer}`
    LAST = "last"


class Layers(StrEnum):
    """Which of the layers have a parameter."""

    ALL = "all"
    DENSE = "dense"  # those with one feed-forward network
    SPARSE = "sparse"  # those with routed experts


class Count(Protocol):
    """Reads a count of config.json, an integer >= 1; see `model_shape.read_model`."""

    def __call__(self, key: str, default: int | None = None) -> int:
        """Return the value of `key`, or the default where it is absent or null; raise LayoutError otherwise."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One parameter of a family.

    Attributes:
        place, cut, layers: see the enums.
        megatron, vllm: parameter names, None where that side fuses these tensors otherwise (another row says how).
            `{layer}` is local to the model chunk in Megatron and global in vLLM.
        tensors: canonical name -> the sizes of its dims by name, in fused order (q, k, v; gate, up).
        experts: whether there is one of these per routed expert. Canonical and Megatron names then contain `{expert}`
            (global, and local to the rank); vLLM stacks a rank's experts in a leading dim.
        dtype: None is the model's; "float32" stays so whatever the model's is. Megatron or vLLM may hold such a
            parameter as a buffer.
        heads: size that a rank's part must be whole multiples of: "q_head" for the rows of q_b_proj.
    """

    place: Place
    cut: Cut
    megatron: str | None
    vllm: str | None
    tensors: Mapping[str, tuple[str, ...]]
    layers: Layers = Layers.ALL
    experts: bool = False
    dtype: str | None = None
    heads: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        rows: its parameters.
        sizes: config.json's counts -> the sizes that the rows name, and "experts" (routed ones) where there are any.
        is_sparse: whether a layer (global number) has routed experts.
        tied: the alias that `tie_word_embeddings` makes.
        only: config keys -> the values for which the rows are right; None stands for an absent key.
        vllm_ends_everywhere: whether vLLM builds embedding, last norm and output head on every pipeline stage.
        verified: whether both sides were checked against the frameworks (vLLM's own loaders, Megatron's own models).
    """

    rows: tuple[Row, ...]
    sizes: Callable[[Count], Mapping[str, int]]
    is_sparse: Callable[[HfConfig, int], bool] = lambda _config, _layer: False
    tied: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    vllm_ends_everywhere: bool = False
    verified: bool = True
