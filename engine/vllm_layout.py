"""What every rank of one vLLM replica holds.

The rules were checked against vLLM 0.32: `linear.py` (each of q, k, v or gate, up is cut, a rank's parts are
concatenated), `vocab_parallel_embedding.py`, `fused_moe/expert_map_manager.py`, `distributed/utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.family_types import Cut, HfConfig, Place, Row
from engine.layout import Layout, LayoutError
from engine.model_shape import ModelShape, check_sizes, divide, read_model
from engine.param_cuts import ContentBuilder, LocalParam, Part, cut_param, make_layout, stack, stack_experts

_VOCABULARY_MULTIPLE = 64  # vllm.model_executor.layers.vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE


def vllm_layout(hf_config: HfConfig, *, tp: int, pp: int = 1, ep: bool = False, dtype: str | None = None) -> Layout:
    """Return what every rank of one vLLM replica holds, `pp * tp` of them; rank = pipeline * tp + tensor.

    The vocabulary is padded to a multiple of 64. Key and value heads are replicated when tp exceeds their number.
    Layers are spread as vLLM does by default (`stage_layers`). With tied embeddings every stage that needs the
    embedding or the head holds one storage, `model.embed_tokens.weight`. Data-parallel replicas have a layout each.

    Args:
        hf_config: parsed config.json of a family in `FAMILIES`.
        tp: tensor-parallel size of the replica, >= 1.
        pp: pipeline stages, >= 1.
        ep: `enable_expert_parallel`: the tp ranks of a stage share the routed experts out, whole, in order (vLLM's
            "linear" placement, the first ranks hold one more); without it every rank holds a part of every expert.
        dtype: of every parameter; None takes the config's. A router's bias is float32 in any case.

    Raises:
        LayoutError: an unknown family, or a size that tp or pp does not divide; named with both values.
    """
    check_sizes("vllm", tp=tp, pp=pp)
    model = read_model(hf_config, dtype)
    if pp > model.num_layers:
        raise LayoutError(f"vllm: pp={pp} stages are more than num_hidden_layers={model.num_layers}")

    if ep and model.num_experts == 0:
        raise LayoutError(f"vllm: ep=True, but model_type {hf_config['model_type']!r} has no routed experts")

    if 0 < model.num_experts < tp:
        raise LayoutError(f"vllm: tp={tp} ranks are more than the {model.num_experts} routed experts")

    contents = []
    cuts = [{row.vllm: _local_param(model, row, tp, rank, ep=ep) for row in _rows(model)} for rank in range(tp)]
    for stage in range(pp):
        for rank in range(tp):
            builder = ContentBuilder(model)
            for row in _rows(model):
                _add_row(builder, model, row, cuts[rank][row.vllm], stage, pp, local_experts(model, tp, rank, ep=ep))
            contents.append(builder.build())

    suffix = (f" pp={pp}" if pp > 1 else "") + (" ep" if ep else "")
    return make_layout(f"vllm tp={tp}{suffix}", model, contents)


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """Return the layers of a pipeline stage, as vllm.distributed.utils.get_pp_indices (0.32) spreads them.

    Each layer that is left over goes to a stage before the last, from the back. The environment's
    VLLM_PP_LAYER_PARTITION, which overrides that, must not be set.

    Example: 10 layers on 4 stages are 2, 3, 3, 2.
    """
    counts = [num_layers // pp] * pp
    for position in range(2, num_layers % pp + 2):
        counts[-position] += 1
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def local_experts(model: ModelShape, tp: int, rank: int, *, ep: bool) -> range:
    """Return the routed experts (global numbers) that a rank of a stage holds, whole with ep, a part of each without.

    Example: 10 experts on 4 ranks with ep are [0, 3), [3, 6), [6, 8), [8, 10).
    """
    if not ep:
        return range(model.num_experts)

    base, rest = divmod(model.num_experts, tp)
    first = rank * base + min(rank, rest)
    return range(first, first + base + (rank < rest))


def _rows(model: ModelShape) -> Iterator[Row]:
    return (row for row in model.rows if row.vllm is not None)


def _add_row(
    builder: ContentBuilder, model: ModelShape, row: Row, local: LocalParam, stage: int, pp: int, experts: range
) -> None:
    """Add a row's parameters of one stage."""
    assert row.vllm is not None
    if row.place is Place.LAYER:
        for layer in stage_layers(model.num_layers, pp, stage):
            if model.has_row(row, layer):
                name = row.vllm.format(layer=layer)
                builder.add(name, local, layer=layer, first_expert=experts.start if row.experts else 0)
        return

    everywhere = model.family.vllm_ends_everywhere
    first, last = everywhere or stage == 0, everywhere or stage == pp - 1
    (tensor,) = row.tensors
    if tensor in model.tied:  # a head without memory of its own
        if last and not first:
            (embedding,) = (each.vllm for each in _rows(model) if model.tied[tensor] in each.tensors)
            assert embedding is not None
            builder.add(embedding, local)
    elif first if row.place is Place.FIRST else last:
        builder.add(row.vllm, local)


def _local_param(model: ModelShape, row: Row, tp: int, rank: int, *, ep: bool) -> LocalParam:
    if row.cut is Cut.QKV:
        return stack(model, row, _qkv(model, row, tp, rank))

    whole = row.experts and ep
    local = cut_param(
        model,
        row,
        1 if whole else tp,
        0 if whole else rank,
        vocabulary_multiple=_VOCABULARY_MULTIPLE,
        where="vllm tp",
    )
    return stack_experts(local, len(local_experts(model, tp, rank, ep=ep))) if row.experts else local


def _qkv(model: ModelShape, row: Row, tp: int, rank: int) -> list[Part]:
    """Cut q, k and v each, then put a rank's parts under one another; with fewer heads than ranks, share a head."""
    query, key, value = row.tensors
    dim, num_kv = model.head_dim, model.num_kv_heads
    num_queries = divide(model.num_heads, tp, f"vllm tp={tp}: {query} heads")
    if num_kv >= tp:
        num_local = divide(num_kv, tp, f"vllm tp={tp}: {key} heads")
        first = rank * num_local
    else:
        num_local, first = 1, rank // divide(tp, num_kv, f"vllm tp={tp} over the heads of {key}")

    kv = [Part(tensor, first * dim, num_local * dim) for tensor in (key, value)]
    return [Part(query, rank * num_queries * dim, num_queries * dim), *kv]
