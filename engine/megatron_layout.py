"""What every Megatron rank holds.

The rules were checked against megatron-core 0.16.1: `attention.py` (q, k and v interleaved by group, the result cut),
`layers.py`, `moe/experts.py` (SequentialMLP), `parallel_state.py` (two grids of ranks, one for the experts),
`transformer_layer.get_transformer_layer_offset` (stages).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from engine.family_types import Cut, HfConfig, Place, Row
from engine.layout import Layout, LayoutError
from engine.model_shape import ModelShape, check_sizes, divide, read_model
from engine.param_cuts import ContentBuilder, LocalParam, Part, RankContent, cut_param, make_layout, stack


class MegatronSizes(TypedDict, total=False):
    """The fields of `MegatronParallel` as keywords."""

    tp: int
    pp: int
    dp: int
    ep: int
    etp: int | None
    cp: int
    vpp: int | None
    layers_per_stage: Sequence[int] | None
    vocabulary_divisor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCoordinates:
    """Place of one Megatron rank in both grids.

    Attributes:
        tensor, context, data, pipeline: in the grid of the dense parameters, fastest first.
        expert_tensor, expert, expert_data: in the grid of the experts, fastest first; then `pipeline` again.
    """

    pipeline: int
    data: int
    tensor: int
    context: int = 0
    expert: int = 0
    expert_tensor: int = 0
    expert_data: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronParallel:
    """How a Megatron world of `tp * cp * dp * pp` ranks is spread.

    Attributes:
        tp, pp, dp, cp: tensor-, pipeline-, data- and context-parallel sizes, >= 1.
        ep: expert-parallel size, >= 1: taken from the tensor-, context- and data-parallel ranks of a stage.
        etp: tensor-parallel size of the experts; None is tp.
        vpp: virtual pipeline stages (model chunks) of a rank; None is one.
        layers_per_stage: layers of every (virtual) stage in the order in which a token passes them, `pp * vpp` counts;
            stage s is chunk `s // pp` of pipeline rank `s % pp`. None spreads them evenly.
        vocabulary_divisor: Megatron's make_vocab_size_divisible_by: the vocabulary is padded to a multiple of tp times
            this.

    Raises:
        LayoutError: sizes that contradict each other; named with both values.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    vpp: int | None = None
    layers_per_stage: Sequence[int] | None = None
    vocabulary_divisor: int = 1

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep, "etp": self.expert_tp, "cp": self.cp}
        check_sizes("megatron", **sizes, vpp=self.num_chunks, vocabulary_divisor=self.vocabulary_divisor)
        if self.num_chunks > 1 and self.pp == 1:
            raise LayoutError(f"megatron: vpp={self.vpp} virtual stages need pp > 1, got pp=1")

        stage, experts = self.tp * self.cp * self.dp, self.expert_tp * self.ep
        if stage % experts:
            raise LayoutError(
                f"megatron: {stage} ranks of a stage (tp={self.tp} cp={self.cp} dp={self.dp}) are no multiple of "
                f"{experts} (etp={self.expert_tp} ep={self.ep})"
            )

        if self.layers_per_stage is not None:
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
            self._check_stages(self.layers_per_stage)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def num_chunks(self) -> int:
        """Model chunks of a rank."""
        return 1 if self.vpp is None else self.vpp

    @property
    def num_ranks(self) -> int:
        """World size."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def name(self) -> str:
        """For messages, for instance "megatron tp=2 pp=1 dp=2 ep=2"; what is at its default is left out."""
        parts = [f"tp={self.tp} pp={self.pp} dp={self.dp}"]
        optional = {"cp": (self.cp, 1), "ep": (self.ep, 1), "etp": (self.expert_tp, self.tp), "vpp": (self.vpp, None)}
        parts += [f"{key}={value}" for key, (value, default) in optional.items() if value != default]
        if self.layers_per_stage is not None:
            parts.append(f"layers={'+'.join(map(str, self.layers_per_stage))}")

        return "megatron " + " ".join(parts)

    def coordinates(self, rank: int) -> MegatronCoordinates:
        """Return where a global rank sits in Megatron's default order "tp-cp-ep-dp-pp", in both grids.

        Example: with tp=2, ep=2, dp=4 (etp=2), rank 5 is tensor 1, data 2; expert tensor 1, expert 0, expert data 1.

        Raises:
            LayoutError: no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise LayoutError(f"rank {rank} is not in [0, {self.num_ranks}) for {self.name.removeprefix('megatron ')}")

        pipeline, within = divmod(rank, self.num_ranks // self.pp)
        return MegatronCoordinates(
            pipeline=pipeline,
            data=within // (self.tp * self.cp),
            context=within // self.tp % self.cp,
            tensor=within % self.tp,
            expert_data=within // (self.expert_tp * self.ep),
            expert=within // self.expert_tp % self.ep,
            expert_tensor=within % self.expert_tp,
        )

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers (global numbers) of every virtual stage, in order.

        Example: 8 layers with pp=2, vpp=2 are [0, 2), [2, 4), [4, 6), [6, 8); rank 0 of the pipeline has the first and
        the third.

        Raises:
            LayoutError: the layers do not fit.
        """
        num_stages = self.pp * self.num_chunks
        counts = self.layers_per_stage
        if counts is None:
            if num_layers % num_stages:
                stages = f"pp={self.pp} stages" + (f" of vpp={self.vpp} chunks" if self.num_chunks > 1 else "")
                raise LayoutError(f"megatron: {num_layers} layers cannot be spread evenly over {stages}")

            counts = (num_layers // num_stages,) * num_stages

        if sum(counts) != num_layers:
            raise LayoutError(f"megatron: layers_per_stage has {sum(counts)} layers, the model {num_layers}")

        starts = [sum(counts[:stage]) for stage in range(num_stages)]
        return tuple(range(start, start + size) for start, size in zip(starts, counts, strict=True))

    def _check_stages(self, counts: Sequence[int]) -> None:
        if len(counts) != self.pp * self.num_chunks or any(size < 0 for size in counts):
            raise LayoutError(
                f"megatron: layers_per_stage must have pp={self.pp} times vpp={self.num_chunks} counts >= 0, "
                f"got {list(counts)}"
            )


def megatron_coordinates(rank: int, *, tp: int, pp: int, dp: int) -> MegatronCoordinates:
    """Return where a global rank sits in a world without experts and context parallelism.

    Example: with tp=2, pp=2, dp=2, rank 5 is pipeline 1, data 0, tensor 1: rank = (pipeline * dp + data) * tp + tensor.

    Raises:
        LayoutError: the rank is not in [0, tp * pp * dp).
    """
    return MegatronParallel(tp=tp, pp=pp, dp=dp).coordinates(rank)


def megatron_layout(
    hf_config: HfConfig,
    parallel: MegatronParallel | None = None,
    *,
    dtype: str | None = None,
    **sizes: Unpack[MegatronSizes],
) -> Layout:
    """Return what every training rank holds, ranked as `MegatronParallel.coordinates` says.

    Layers are numbered per model chunk in parameter names; with more chunks than one a name starts with the chunk's
    number, "1.decoder.layers.0..." as torch.nn.ModuleList(chunks) has it. With tied embeddings and pp > 1 the last
    stage's `output_layer.weight` is a second holder of the embedding; with pp = 1 it does not exist. Ranks that differ
    in the data- and context-parallel coordinates only share their objects.

    Args:
        hf_config: parsed config.json of a family in `FAMILIES`.
        parallel: the sizes; or give them as keywords.
        dtype: of every parameter, "float32" for instance; None takes the config's. A router's bias is float32 anyway.
        sizes: the fields of `MegatronParallel`.

    Raises:
        LayoutError: an unknown family, a size that an axis does not divide, or axes that Megatron gets wrong; named
            with both values.
    """
    assert parallel is None or not sizes, "give the sizes once"
    parallel = MegatronParallel(**sizes) if parallel is None else parallel
    model = read_model(hf_config, dtype)
    _check_heads(model, parallel)
    _check_experts(model, parallel, hf_config["model_type"])
    stages = parallel.stage_layers(model.num_layers)
    dense = [_dense_cuts(model, parallel, rank) for rank in range(parallel.tp)]
    experts = [_expert_cuts(model, parallel, rank) for rank in range(parallel.expert_tp)] if model.num_experts else []

    contents: dict[tuple[int, ...], RankContent] = {}
    ranks = []
    for rank in range(parallel.num_ranks):
        place = parallel.coordinates(rank)
        key: tuple[int, ...] = (place.pipeline, place.tensor)
        if experts:
            key += (place.expert, place.expert_tensor)

        if key not in contents:
            cuts = dense[place.tensor] | (experts[place.expert_tensor] if experts else {})
            contents[key] = _rank_content(model, parallel, place, cuts, stages)
        ranks.append(contents[key])
    return make_layout(parallel.name, model, ranks)


def _check_heads(model: ModelShape, parallel: MegatronParallel) -> None:
    """Whole query heads on every rank; groups divide tp or are divided by it (`TransformerConfig.__post_init__`)."""
    divide(model.num_heads, parallel.tp, f"megatron tp={parallel.tp}: num_attention_heads")
    groups = model.num_kv_heads
    if groups % parallel.tp and parallel.tp % groups:
        raise LayoutError(
            f"megatron: num_key_value_heads={groups} is neither a multiple nor a divisor of tp={parallel.tp}"
        )


def _check_experts(model: ModelShape, parallel: MegatronParallel, model_type: str) -> None:
    if model.num_experts == 0:
        for name, size, default in (("ep", parallel.ep, 1), ("etp", parallel.expert_tp, parallel.tp)):
            if size != default:
                raise LayoutError(f"megatron: {name}={size}, but model_type {model_type!r} has no routed experts")
        return

    divide(model.num_experts, parallel.ep, f"megatron ep={parallel.ep}: routed experts")
    if parallel.ep == 1 and parallel.expert_tp != parallel.tp:
        raise LayoutError(
            f"megatron: etp={parallel.expert_tp} with tp={parallel.tp} and ep=1: megatron-core 0.16.1 then reduces the "
            f"experts' gradients over the wrong ranks and their weights drift apart; make etp equal to tp, or ep > 1"
        )


def _dense_cuts(model: ModelShape, parallel: MegatronParallel, rank: int) -> dict[str, LocalParam]:
    """Return a tensor-parallel rank's part of every row but the experts', by Megatron's name."""
    multiple = parallel.tp * parallel.vocabulary_divisor
    return {
        name: stack(model, row, _qkv(model, row, parallel.tp, rank))
        if row.cut is Cut.QKV
        else cut_param(model, row, parallel.tp, rank, vocabulary_multiple=multiple, where="megatron tp")
        for name, row in _rows(model)
        if not row.experts
    }


def _expert_cuts(model: ModelShape, parallel: MegatronParallel, rank: int) -> dict[str, LocalParam]:
    return {
        name: cut_param(model, row, parallel.expert_tp, rank, vocabulary_multiple=1, where="megatron etp")
        for name, row in _rows(model)
        if row.experts
    }


def _rows(model: ModelShape) -> Iterator[tuple[str, Row]]:
    return ((row.megatron, row) for row in model.rows if row.megatron is not None)


def _rank_content(
    model: ModelShape,
    parallel: MegatronParallel,
    place: MegatronCoordinates,
    cuts: dict[str, LocalParam],
    stages: tuple[range, ...],
) -> RankContent:
    builder = ContentBuilder(model)
    num_local = model.num_experts // parallel.ep
    experts = range(place.expert * num_local, (place.expert + 1) * num_local)
    for chunk in range(parallel.num_chunks):
        prefix = f"{chunk}." if parallel.num_chunks > 1 else ""
        stage = chunk * parallel.pp + place.pipeline
        for pattern, row in _rows(model):
            if row.place is Place.LAYER:
                _add_layers(builder, model, row, prefix + pattern, cuts[pattern], stages[stage], experts)

            elif stage == (0 if row.place is Place.FIRST else len(stages) - 1) and (
                parallel.pp > 1 or not model.tied.keys() & row.tensors.keys()
            ):
                builder.add(prefix + pattern, cuts[pattern])
    return builder.build()


def _add_layers(
    builder: ContentBuilder,
    model: ModelShape,
    row: Row,
    pattern: str,
    local: LocalParam,
    layers: range,
    experts: range,
) -> None:
    """Add a row's parameters of one model chunk; of experts, one for each that the rank holds."""
    for index, layer in enumerate(layers):
        if not model.has_row(row, layer):
            continue

        for position, expert in enumerate(experts if row.experts else range(1)):
            builder.add(pattern.format(layer=index, expert=position), local, layer=layer, first_expert=expert)


def _qkv(model: ModelShape, row: Row, tp: int, rank: int) -> list[Part]:
    """Interleave by group (its query heads, its key head, its value head), then cut the rows in `tp` equal parts.

    q_h is at row ((h // r)(r + 2) + h % r) d, k_g at (g(r + 2) + r) d, v_g at k_g + d, r = H / G. With
    more ranks than groups a cut falls inside a group.
    """
    query, key, value = row.tensors
    dim, group_rows = model.head_dim, model.num_heads // model.num_kv_heads * model.head_dim
    fused: list[Part] = []
    for group in range(model.num_kv_heads):
        fused.append(Part(query, group * group_rows, group_rows))
        fused.extend(Part(tensor, group * dim, dim) for tensor in (key, value))

    num_rows = divide(sum(part.num_rows for part in fused), tp, f"megatron tp={tp}: {query} with k and v, rows")
    return _window(fused, rank * num_rows, num_rows)


def _window(parts: list[Part], start: int, num_rows: int) -> list[Part]:
    """Return rows [start, start + num_rows) of parts that lie under one another."""
    cut: list[Part] = []
    top = 0
    for part in parts:
        first, last = max(start - top, 0), min(start + num_rows - top, part.num_rows)
        if first < last:
            cut.append(Part(part.tensor, part.start + first, last - first))

        top += part.num_rows
    return cut
