"""What a plan costs, next to the least that any plan could cost. Pure, no torch.

The bounds come from the layouts alone, not from the plan that is judged: a target rank must receive what it needs and
its device does not hold, |W minus S|; the busiest sender has at least what the best sharing over the holders leaves it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from engine.balance import HolderClass, busiest
from engine.layout import DTYPE_BYTES, Box, Layout
from engine.pieces import find_pieces
from engine.placement import Placement, boxes_by_tensor
from engine.plan import Plan

BUCKETS_IN_FLIGHT = 2
"""Bounded mode: buckets that a rank holds at once, one being filled or emptied while the other is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """The figures of one plan; bytes throughout, one entry a rank where it says so.

    Attributes:
        received, bound: per target rank, what it receives and the least that it must, |W minus S|.
        kept: per target rank, what its own device already holds.
        sent: per source rank.
        best_busiest: the least that the busiest sender can send.
        between_nodes: bytes that leave a node; 0 without a placement.
        receiver_bytes: of the largest target rank's parameters, the unit of the staging shares.
        full_source, full_target: `full` mode: the most that a sender and a receiver stage.
        bounded_source, bounded_target: `bounded` mode: the same, with `BUCKETS_IN_FLIGHT` buckets at once.
        num_copies, num_buckets: of one version; the copies include local ones.
    """

    received: tuple[int, ...]
    bound: tuple[int, ...]
    kept: tuple[int, ...]
    sent: tuple[int, ...]
    best_busiest: int
    between_nodes: int
    receiver_bytes: int
    full_source: int
    full_target: int
    bounded_source: int
    bounded_target: int
    num_copies: int
    num_buckets: int

    @property
    def bytes_over_bound(self) -> float:
        """Bytes moved / lower bound; 1.0 is optimal."""
        return _ratio(sum(self.received), sum(self.bound))

    @property
    def busiest_over_best(self) -> float:
        """Busiest sender / the best possible."""
        return _ratio(max(self.sent), self.best_busiest)


def plan_figures(plan: Plan) -> PlanFigures:
    """Measure a plan against the bounds of its layouts."""
    target, source, place = plan.target, plan.source, plan.placement
    received = tuple(plan.target_bytes(rank) for rank in range(target.num_ranks))
    sent = tuple(plan.source_bytes(rank) for rank in range(source.num_ranks))
    kept = [0] * target.num_ranks
    for part in plan.local:
        kept[part.target_rank] += part.num_bytes

    window = BUCKETS_IN_FLIGHT * plan.bucket_bytes
    return PlanFigures(
        received=received,
        bound=lower_bound(source, target, place),
        kept=tuple(kept),
        sent=sent,
        best_busiest=best_busiest(source, target, place),
        between_nodes=0 if place is None else _between_nodes(plan, place),
        receiver_bytes=max(target.rank_bytes(rank) for rank in range(target.num_ranks)),
        full_source=max(sent),
        full_target=max(received),
        bounded_source=min(max(sent), window),
        bounded_target=min(max(received), window),
        num_copies=plan.num_copies,
        num_buckets=plan.num_buckets,
    )


def lower_bound(source: Layout, target: Layout, placement: Placement | None = None) -> tuple[int, ...]:
    """Return |W minus S| per target rank: bytes that it needs, each once, and that its own device does not hold.

    Without a placement the devices are others (disaggregated): all that it needs. Bytes are in the target's dtypes.
    """
    on_device: dict[int, list[int]] = defaultdict(list)
    if placement is not None:
        for rank, device in enumerate(placement.source_devices):
            on_device[device].append(rank)

    found: dict[tuple[int, ...], int] = {}
    bounds: list[int] = []
    for rank in range(target.num_ranks):
        own = on_device[placement.target_devices[rank]] if placement is not None else []
        key = id(target.shards[rank]), id(target.params[rank]), *(id(source.shards[held]) for held in own)
        if key not in found:
            held = boxes_by_tensor([shard for other in own for shard in source.shards[other]])
            found[key] = _missing_bytes(target, rank, held)
        bounds.append(found[key])
    return tuple(bounds)


def best_busiest(source: Layout, target: Layout, placement: Placement | None = None) -> int:
    """Return the bytes of the busiest sender in the best sharing over the nearest holders (rounded up to a byte)."""
    largest = max(DTYPE_BYTES.values())
    pieces = find_pieces(source, target, largest, placement)
    return busiest(
        [HolderClass(ranks, sum(item.num_bytes for item in items)) for ranks, items in pieces.by_holders.items()]
    )


def _missing_bytes(target: Layout, rank: int, held: Mapping[str, list[Box]]) -> int:
    """Count what the shards of a target rank need and `held` lacks; an element that two of them need counts once."""
    total = 0
    seen: dict[str, list[Box]] = defaultdict(list)
    for shard in target.shards[rank]:
        rest = [shard.box]
        for box in (*held.get(shard.tensor, ()), *seen[shard.tensor]):
            rest = [left for part in rest for left in part.subtract(box)]
        seen[shard.tensor].append(shard.box)
        item = DTYPE_BYTES[target.params[rank][shard.param].dtype]
        total += sum(part.num_elements for part in rest) * item
    return total


def _between_nodes(plan: Plan, placement: Placement) -> int:
    nodes = placement.device_nodes
    return sum(
        bucket.num_bytes
        for bucket in plan.buckets
        if nodes[placement.source_devices[bucket.source_rank]] != nodes[placement.target_devices[bucket.target_rank]]
    )


def _ratio(value: int, best: int) -> float:
    """`value / best`; nothing of nothing is optimal."""
    return value / best if best else 1.0 if value == 0 else float("inf")
