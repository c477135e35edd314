"""What every rank of Megatron, of vLLM and of a Hugging Face folder holds, from the family's table and a config.json.

The rules of the cuts (Megatron interleaves q, k and v by group and cuts the result, vLLM cuts each and concatenates)
were checked against megatron-core 0.16.1 (`attention.py`, `layers.py`) and vLLM 0.32 (`linear.py`,
`vocab_parallel_embedding.py`). A new family is a new table, not a new branch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.family_tables import FAMILIES, Cut, Place, Row
from engine.layout import Box, Index, Layout, LayoutError, Pad, Shard, TensorSpec

HfConfig = Mapping[str, Any]
"""A parsed Hugging Face `config.json`."""

_VLLM_VOCABULARY_MULTIPLE = 64  # vllm.model_executor.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A family's table with one config's numbers in it: what both sides' layouts are made from."""

    rows: tuple[Row, ...]
    tied: Mapping[str, str]
    sizes: Mapping[str, int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def shape(self, row: Row, tensor: str) -> Index:
        return tuple(self.sizes[size] for size in row.tensors[tensor])

    def layers(self, row: Row) -> range:
        return range(self.num_layers if row.place is Place.LAYER else 1)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """All canonical tensors; a tied alias is none."""
        return {
            tensor.format(layer=layer): TensorSpec(self.shape(row, tensor), self.dtype)
            for row in self.rows
            for tensor in row.tensors
            for layer in self.layers(row)
            if tensor not in self.tied
        }


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows [start, start + num_rows) of one tensor of a `Row`."""

    tensor: str
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class _LocalParam:
    """One rank's parameter of a `Row`, names still with `{layer}`."""

    shape: Index
    blocks: tuple[tuple[str, Box, Index], ...]  # tensor, box in it, start in the parameter
    pads: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCoordinates:
    """Place of one Megatron rank; `tensor` varies fastest, then `data`, then `pipeline`."""

    pipeline: int
    data: int
    tensor: int


def megatron_coordinates(rank: int, *, tp: int, pp: int, dp: int) -> MegatronCoordinates:
    """Return where a global rank sits in Megatron's default order "tp-cp-ep-dp-pp".

    Example: with tp=2, pp=2, dp=2, rank 5 is pipeline 1, data 0, tensor 1: rank = (pipeline * dp + data) * tp + tensor.

    Raises:
        LayoutError: the rank is not in [0, tp * pp * dp).
    """
    if not 0 <= rank < tp * pp * dp:
        raise LayoutError(f"rank {rank} is not in [0, {tp * pp * dp}) for tp={tp} pp={pp} dp={dp}")

    return MegatronCoordinates(pipeline=rank // (tp * dp), data=rank // tp % dp, tensor=rank % tp)


def megatron_layout(hf_config: HfConfig, *, tp: int, pp: int, dp: int, dtype: str | None = None) -> Layout:
    """Return what every training rank holds, `tp * pp * dp` of them, ranked as `megatron_coordinates` says.

    Layers are spread evenly over the stages and numbered per stage in parameter names. The vocabulary is padded to a
    multiple of tp. With tied embeddings and pp > 1 the last stage's `output_layer.weight` is a second holder of the
    embedding; with pp = 1 it does not exist.

    Args:
        hf_config: parsed config.json of a family in `FAMILIES`.
        tp, pp, dp: tensor-, pipeline- and data-parallel sizes, >= 1.
        dtype: of every parameter, "float32" for instance; None takes the config's.

    Raises:
        LayoutError: an unknown family, or a size that tp or pp does not divide; named with both values.
    """
    model = _read_config(hf_config, dtype, tp=tp, pp=pp, dp=dp)
    if model.num_layers % pp:
        raise LayoutError(f"megatron: {model.num_layers} layers cannot be spread evenly over pp={pp} stages")

    layers_per_stage = model.num_layers // pp
    cuts = [[_megatron_param(model, row, tp, rank) for row in model.rows] for rank in range(tp)]
    builder = _LayoutBuilder()
    for rank in range(tp * pp * dp):
        place = megatron_coordinates(rank, tp=tp, pp=pp, dp=dp)
        builder.start_rank()
        for row, local in zip(model.rows, cuts[place.tensor], strict=True):
            if row.place is Place.LAYER:
                for layer in range(layers_per_stage):
                    builder.add(row.megatron, local, model, layer, place.pipeline * layers_per_stage + layer)

            elif place.pipeline == (0 if row.place is Place.FIRST else pp - 1) and _has_storage(model, row, pp):
                builder.add(row.megatron, local, model)
    return builder.build(f"megatron tp={tp} pp={pp} dp={dp}", model)


def vllm_layout(hf_config: HfConfig, *, tp: int, dtype: str | None = None) -> Layout:
    """Return what every rank of one vLLM replica holds, `tp` of them.

    The vocabulary is padded to a multiple of 64. Key and value heads are replicated when tp exceeds their number. With
    tied embeddings there is one storage, `model.embed_tokens.weight`.

    Args:
        hf_config: parsed config.json of a family in `FAMILIES`.
        tp: tensor-parallel size of the replica, >= 1.
        dtype: of every parameter; None takes the config's.

    Raises:
        LayoutError: an unknown family, or a size that tp does not divide; named with both values.
    """
    model = _read_config(hf_config, dtype, tp=tp)
    builder = _LayoutBuilder()
    for rank in range(tp):
        builder.start_rank()
        for row in model.rows:
            local = _vllm_param(model, row, tp, rank)
            for layer in model.layers(row) if _has_storage(model, row, num_stages=1) else ():
                builder.add(row.vllm, local, model, layer, layer)
    return builder.build(f"vllm tp={tp}", model)


def canonical_layout(hf_config: HfConfig, *, dtype: str | None = None) -> Layout:
    """Return the layout of a Hugging Face folder: one rank that holds every tensor whole, under its own name.

    Args:
        hf_config: parsed config.json of a family in `FAMILIES`.
        dtype: of every tensor; None takes the config's.

    Raises:
        LayoutError: an unknown family.
    """
    model = _read_config(hf_config, dtype)
    tensors = model.tensors
    shards = tuple(Shard(name, _whole(spec.shape), name, (0,) * len(spec.shape)) for name, spec in tensors.items())
    return Layout("canonical", tensors, (tensors,), (shards,), ((),), model.tied)


class _LayoutBuilder:
    """Collects parameters rank by rank."""

    def __init__(self) -> None:
        self._params: list[dict[str, TensorSpec]] = []
        self._shards: list[list[Shard]] = []
        self._pads: list[list[Pad]] = []

    def start_rank(self) -> None:
        self._params.append({})
        self._shards.append([])
        self._pads.append([])

    def add(self, pattern: str, local: _LocalParam, model: _Model, local_layer: int = 0, layer: int = 0) -> None:
        """Add one parameter to the current rank; a tied alias becomes a holder of the tensor it is tied to."""
        param = pattern.format(layer=local_layer)
        self._params[-1][param] = TensorSpec(local.shape, model.dtype)
        for tensor, box, start in local.blocks:
            name = model.tied.get(tensor, tensor).format(layer=layer)
            self._shards[-1].append(Shard(name, box, param, start))
        self._pads[-1].extend(Pad(param, box) for box in local.pads)

    def build(self, name: str, model: _Model) -> Layout:
        shards = tuple(map(tuple, self._shards))
        return Layout(name, model.tensors, tuple(self._params), shards, tuple(map(tuple, self._pads)), model.tied)


def _read_config(hf_config: HfConfig, dtype: str | None, **parallel: int) -> _Model:
    for name, size in parallel.items():
        if size < 1:
            raise LayoutError(f"{name} must be >= 1, got {size}")

    model_type = hf_config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise LayoutError(f"no weight layout for model_type {model_type!r}; known are {', '.join(sorted(FAMILIES))}")

    num_heads = _number(hf_config, "num_attention_heads")
    num_kv_heads = _number(hf_config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise LayoutError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")

    hidden = _number(hf_config, "hidden_size")
    head_dim = _number(hf_config, "head_dim", hidden // num_heads)
    config_dtype = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    return _Model(
        rows=family.rows,
        tied=family.tied if hf_config.get("tie_word_embeddings", False) else {},
        sizes={
            "vocabulary": _number(hf_config, "vocab_size"),
            "hidden": hidden,
            "ffn": _number(hf_config, "intermediate_size"),
            "q": num_heads * head_dim,
            "kv": num_kv_heads * head_dim,
        },
        num_layers=_number(hf_config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(config_dtype) if dtype is None else dtype,
    )


def _number(hf_config: HfConfig, key: str, default: int | None = None) -> int:
    """Return a count of the config, >= 1; Hugging Face writes null where the default is meant."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise LayoutError(f"config.json: {key} must be an integer >= 1, got {value!r}")

    return value


def _has_storage(model: _Model, row: Row, num_stages: int) -> bool:
    """Whether a row has memory of its own: a tied output layer has it only on another stage than the embedding."""
    return num_stages > 1 or not any(tensor in model.tied for tensor in row.tensors)


def _whole(shape: Index) -> Box:
    return Box((0,) * len(shape), shape)


def _megatron_param(model: _Model, row: Row, tp: int, rank: int) -> _LocalParam:
    if row.cut is Cut.QKV:
        return _stack(model, row, _megatron_qkv(model, row, tp, rank))

    return _common_param(model, row, tp, rank, vocabulary_multiple=tp)


def _vllm_param(model: _Model, row: Row, tp: int, rank: int) -> _LocalParam:
    if row.cut is Cut.QKV:
        return _stack(model, row, _vllm_qkv(model, row, tp, rank))

    return _common_param(model, row, tp, rank, vocabulary_multiple=_VLLM_VOCABULARY_MULTIPLE)


def _common_param(model: _Model, row: Row, tp: int, rank: int, vocabulary_multiple: int) -> _LocalParam:
    """Cut what both sides cut alike."""
    shapes = {tensor: model.shape(row, tensor) for tensor in row.tensors}
    if row.cut is Cut.REPLICATED:
        return _stack(model, row, [_Part(tensor, 0, shape[0]) for tensor, shape in shapes.items()])

    if row.cut is Cut.GATE_UP:
        sizes = {tensor: _divide(shape[0], tp, f"{tensor} rows") for tensor, shape in shapes.items()}
        return _stack(model, row, [_Part(tensor, rank * size, size) for tensor, size in sizes.items()])

    ((tensor, shape),) = shapes.items()
    if row.cut is Cut.COLUMNS:
        size = _divide(shape[1], tp, f"{tensor} columns")
        local = (shape[0], size)
        return _LocalParam(local, ((tensor, Box((0, rank * size), local), (0, 0)),))

    assert row.cut is Cut.VOCABULARY, row.cut
    padded = -(-shape[0] // vocabulary_multiple) * vocabulary_multiple
    size = _divide(padded, tp, f"{tensor} rows, padded to a multiple of {vocabulary_multiple},")
    num_rows = min(max(shape[0] - rank * size, 0), size)
    return _stack(model, row, [_Part(tensor, rank * size, num_rows)] if num_rows else [], num_rows=size)


def _stack(model: _Model, row: Row, parts: list[_Part], num_rows: int | None = None) -> _LocalParam:
    """Put parts under one another in dim 0; what is left of `num_rows` below them is padding."""
    columns = model.shape(row, next(iter(row.tensors)))[1:]
    origin = (0,) * len(columns)
    blocks: list[tuple[str, Box, Index]] = []
    top = 0
    for part in parts:
        blocks.append((part.tensor, Box((part.start, *origin), (part.num_rows, *columns)), (top, *origin)))
        top += part.num_rows

    height = top if num_rows is None else num_rows
    pads = (Box((top, *origin), (height - top, *columns)),) if height > top else ()
    return _LocalParam((height, *columns), tuple(blocks), pads)


def _megatron_qkv(model: _Model, row: Row, tp: int, rank: int) -> list[_Part]:
    """Interleave by group (its query heads, its key head, its value head), then cut the rows in `tp` equal parts.

    q_h is at row ((h // r)(r + 2) + h % r) d, k_g at (g(r + 2) + r) d, v_g at k_g + d, r = H / G. With
    more ranks than groups a cut falls inside a group.
    """
    query, key, value = row.tensors
    dim, group_rows = model.head_dim, model.num_heads // model.num_kv_heads * model.head_dim
    fused: list[_Part] = []
    for group in range(model.num_kv_heads):
        fused.append(_Part(query, group * group_rows, group_rows))
        fused.extend(_Part(tensor, group * dim, dim) for tensor in (key, value))

    num_rows = _divide(sum(part.num_rows for part in fused), tp, f"{query} with k and v, rows")
    return _window(fused, rank * num_rows, num_rows)


def _window(parts: list[_Part], start: int, num_rows: int) -> list[_Part]:
    """Return rows [start, start + num_rows) of parts that lie under one another."""
    cut: list[_Part] = []
    top = 0
    for part in parts:
        first, last = max(start - top, 0), min(start + num_rows - top, part.num_rows)
        if first < last:
            cut.append(_Part(part.tensor, part.start + first, last - first))

        top += part.num_rows
    return cut


def _vllm_qkv(model: _Model, row: Row, tp: int, rank: int) -> list[_Part]:
    """Cut q, k and v each, then put a rank's parts under one another; with fewer heads than ranks, share a head."""
    query, key, value = row.tensors
    dim, num_kv = model.head_dim, model.num_kv_heads
    num_queries = _divide(model.num_heads, tp, f"{query} heads")
    if num_kv >= tp:
        num_local = _divide(num_kv, tp, f"{key} heads")
        first = rank * num_local
    else:
        num_local, first = 1, rank // _divide(tp, num_kv, f"vllm tp={tp} over the heads of {key}")

    kv = [_Part(tensor, first * dim, num_local * dim) for tensor in (key, value)]
    return [_Part(query, rank * num_queries * dim, num_queries * dim), *kv]


def _divide(size: int, by: int, what: str) -> int:
    if size % by:
        raise LayoutError(f"{what}: {size} cannot be divided evenly by {by}")

    return size // by
