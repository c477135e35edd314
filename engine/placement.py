"""Which device each rank is on, and which ranks are near which. Pure, no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.layout import Box, Layout, LayoutError, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every rank of both sides is.

    Attributes:
        source_devices: by source rank.
        target_devices: by target rank.
        device_nodes: by device. A piece is taken from the target's own device, else from its node, else from another.

    Raises:
        LayoutError: a device that is not in `device_nodes`.

    Example: two training ranks and two inference ranks that share two devices of one node:
    `Placement(source_devices=(0, 1), target_devices=(0, 1), device_nodes=(0, 0))`.
    """

    source_devices: tuple[int, ...]
    target_devices: tuple[int, ...]
    device_nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        for side, devices in (("source", self.source_devices), ("target", self.target_devices)):
            for rank, device in enumerate(devices):
                if not 0 <= device < len(self.device_nodes):
                    raise LayoutError(
                        f"placement: {side} rank {rank} is on device {device}, "
                        f"but there are {len(self.device_nodes)} devices"
                    )

    def check(self, source: Layout, target: Layout) -> None:
        """Raise LayoutError unless both layouts have as many ranks as are placed."""
        for layout, devices in ((source, self.source_devices), (target, self.target_devices)):
            if layout.num_ranks != len(devices):
                raise LayoutError(f"{layout.name} has {layout.num_ranks} ranks, the placement places {len(devices)}")

    def nearest(self, ranks: Sequence[int], target_rank: int) -> tuple[int | None, tuple[int, ...]]:
        """Return the first of `ranks` on the target's own device, if any; and those on its node, else all of them."""
        device = self.target_devices[target_rank]
        node = self.device_nodes[device]
        own = next((rank for rank in ranks if self.source_devices[rank] == device), None)
        near = tuple(rank for rank in ranks if self.device_nodes[self.source_devices[rank]] == node)
        return own, near or tuple(ranks)


def repeated(layout: Layout, num: int) -> Layout:
    """Return `num` replicas of a layout as one; rank r of replica k is k * layout.num_ranks + r.

    The replicas share the objects of the one that is given: it costs no more than that one.
    """
    if num < 1:
        raise LayoutError(f"layout {layout.name}: the number of replicas must be >= 1, got {num}")

    return replace(
        layout,
        name=f"{layout.name} x{num}",
        params=layout.params * num,
        shards=layout.shards * num,
        pads=layout.pads * num,
    )


def boxes_by_tensor(shards: Sequence[Shard]) -> dict[str, list[Box]]:
    """Return what a rank holds of each tensor as disjoint boxes, every element once."""
    held: dict[str, list[Box]] = defaultdict(list)
    for shard in shards:
        rest = [shard.box]
        for box in held[shard.tensor]:
            rest = [left for part in rest for left in part.subtract(box)]
        held[shard.tensor].extend(rest)
    return dict(held)
