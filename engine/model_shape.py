"""A family's table with one config's numbers in it: what both sides' layouts are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from sys import intern
from typing import Any

from engine.family_tables import FAMILIES
from engine.family_types import Family, HfConfig, Layers, Place, Row
from engine.layout import Index, LayoutError, TensorSpec


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One model.

    Attributes:
        family: its table.
        tied: alias -> canonical name; empty where config.json does not tie.
        sizes: by the names that the rows use.
        sparse: per layer, whether it has routed experts.
        num_heads, num_kv_heads, head_dim: of the attention.
        dtype: of every parameter whose row names none.
    """

    family: Family
    tied: Mapping[str, str]
    sizes: Mapping[str, int]
    sparse: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    dtype: str

    @property
    def rows(self) -> tuple[Row, ...]:
        """The family's rows."""
        return self.family.rows

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.sparse)

    @property
    def num_experts(self) -> int:
        """Routed experts of a sparse layer; 0 in a dense model."""
        return self.sizes.get("experts", 0)

    @property
    def head_dim(self) -> int:
        """Width of a query, key or value head."""
        return self.sizes["head"]

    def row_shape(self, row: Row, tensor: str) -> Index:
        """Return the shape of one of a row's tensors."""
        return tuple(self.sizes[size] for size in row.tensors[tensor])

    def row_dtype(self, row: Row) -> str:
        """Return the dtype of a row's parameter, which no choice of the model's dtype lowers."""
        return self.dtype if row.dtype is None else row.dtype

    def has_row(self, row: Row, layer: int) -> bool:
        """Whether a layer (global number) has a parameter of this row."""
        return row.layers is Layers.ALL or (row.layers is Layers.SPARSE) == self.sparse[layer]

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """All canonical tensors; a tied alias is none."""
        found: dict[str, TensorSpec] = {}
        for row in self.rows:
            for tensor in row.tensors:
                if tensor not in self.tied:
                    spec = TensorSpec(self.row_shape(row, tensor), self.row_dtype(row))
                    found |= dict.fromkeys(self._names(row, tensor), spec)
        return found

    def _names(self, row: Row, tensor: str) -> Iterator[str]:
        for layer in range(self.num_layers if row.place is Place.LAYER else 1):
            if row.place is not Place.LAYER or self.has_row(row, layer):
                for expert in range(self.num_experts if row.experts else 1):
                    yield intern(tensor.format(layer=layer, expert=expert))


def read_model(hf_config: HfConfig, dtype: str | None) -> ModelShape:
    """Return the shape of a model.

    Args:
        hf_config: parsed config.json of a family in `FAMILIES`.
        dtype: of the parameters, "bfloat16" for instance; None takes the config's.

    Raises:
        LayoutError: an unknown family, a missing count, weights that are quantized, or a switch that the family's
            table does not cover; named with its value.
    """
    model_type = hf_config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise LayoutError(f"no weight layout for model_type {model_type!r}; known are {', '.join(sorted(FAMILIES))}")

    quantized = hf_config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise LayoutError(
            f"config.json: quantization_config={method!r}: block scales over the edge of a shard are no boxes; "
            f"only unquantized weights have a layout"
        )

    for key, values in family.only.items():
        if hf_config.get(key) not in values:
            allowed = ", ".join("absent" if value is None else repr(value) for value in values)
            raise LayoutError(f"config.json: {key}={hf_config.get(key)!r}: the layout of {model_type} needs {allowed}")

    count = partial(_count, hf_config)
    num_heads = count("num_attention_heads")
    num_kv_heads = count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise LayoutError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")

    config_dtype = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    return ModelShape(
        family=family,
        tied=family.tied if hf_config.get("tie_word_embeddings", False) else {},
        sizes=family.sizes(count),
        sparse=tuple(family.is_sparse(hf_config, layer) for layer in range(count("num_hidden_layers"))),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=str(config_dtype) if dtype is None else dtype,
    )


def divide(size: int, by: int, what: str) -> int:
    """Return size / by.

    Raises:
        LayoutError: it is no integer; the message starts with `what`.
    """
    if size % by:
        raise LayoutError(f"{what}: {size} cannot be divided evenly by {by}")

    return size // by


def check_sizes(side: str, **sizes: Any) -> None:  # noqa: ANN401
    """Raise unless every parallel size is an integer >= 1.

    Raises:
        LayoutError: with side, name and value.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise LayoutError(f"{side}: {name} must be >= 1, got {size}")


def _count(hf_config: HfConfig, key: str, default: int | None = None) -> int:
    """Return a count of the config, >= 1; Hugging Face writes null where the default is meant."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise LayoutError(f"config.json: {key} must be an integer >= 1, got {value!r}")

    return value
