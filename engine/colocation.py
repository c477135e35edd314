"""Colocated: which inference rank should be on which device, so that the fewest bytes move. No torch.

A device then holds a training rank and an inference rank in turn. What it already holds need not move, so the mapping
of inference ranks to devices decides the volume: vLLM's own order keeps little of it, HybridFlow's grouping (arXiv
2409.19256, section 5) the most that is possible for nested layouts. `place_colocated` finds the best mapping for any
two layouts, as an assignment problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layout import Layout, LayoutError
from engine.pieces import kept_bytes
from engine.placement import Placement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def place_colocated(source: Layout, target: Layout, *, devices_per_node: int | None = None) -> Placement:
    """Map the target's ranks to the source's devices so that the fewest bytes move.

    The source's rank r is on device r. The sum over all devices of what they keep is as large as any one-to-one mapping
    can make it (Hungarian algorithm, exact); of equally good mappings, one that keeps ranks near their own number.

    Args:
        source: the training ranks.
        target: all inference ranks, replicas included (`repeated`); at most as many as the source has.
        devices_per_node: None puts all devices on one node.

    Raises:
        LayoutError: more target ranks than devices.
    """
    import numpy as np

    num_devices = source.num_ranks
    if target.num_ranks > num_devices:
        raise LayoutError(f"colocated: {target.name} has {target.num_ranks} ranks for {num_devices} devices")

    per_node = num_devices if devices_per_node is None else devices_per_node
    kept = kept_bytes(source, target)
    ranks, devices = np.arange(target.num_ranks), np.arange(num_devices)
    distance = np.abs(ranks[:, None] - devices[None, :])
    cost = distance - kept * (num_devices**2 + 1)  # a byte kept outweighs all distances together
    return Placement(
        source_devices=tuple(range(num_devices)),
        target_devices=tuple(map(int, assign(cost))),
        device_nodes=tuple(device // per_node for device in range(num_devices)),
    )


def assign(cost: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for every row a column of its own so that the summed cost is the smallest possible.

    The Hungarian algorithm with potentials, one shortest augmenting path a row: exact in integers, O(rows^2 columns).

    Args:
        cost: int64 [rows, columns], rows <= columns.

    Example: `assign(np.array([[1, 2], [1, 9]]))` is `[1, 0]`: 2 + 1.
    """
    import numpy as np

    num_rows, num_columns = cost.shape
    assert num_rows <= num_columns, cost.shape
    u, v = np.zeros(num_rows + 1, dtype=np.int64), np.zeros(num_columns + 1, dtype=np.int64)
    owner = np.full(num_columns + 1, num_rows)  # column -> row; the last column is where every path starts
    far = np.iinfo(np.int64).max // 4
    for row in range(num_rows):
        column = num_columns
        owner[column] = row
        nearest, seen = np.full(num_columns, far), np.zeros(num_columns + 1, dtype=bool)
        previous = np.full(num_columns, num_columns)
        while owner[column] != num_rows:
            seen[column] = True
            reduced = cost[owner[column]] - u[owner[column]] - v[:-1]
            better = ~seen[:-1] & (reduced < nearest)
            nearest[better], previous[better] = reduced[better], column
            following = int(np.argmin(np.where(seen[:-1], far, nearest)))
            step = nearest[following]
            u[owner[seen]] += step
            v[seen] -= step
            nearest[~seen[:-1]] -= step
            column = following

        while column != num_columns:
            owner[column] = owner[previous[column]]
            column = int(previous[column])

    columns = np.empty(num_rows, dtype=np.int64)
    taken = np.flatnonzero(owner[:-1] < num_rows)
    columns[owner[taken]] = taken
    return columns
