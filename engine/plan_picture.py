"""The picture of a plan: who sends what to whom. Needs the extra `plot` (matplotlib), imported here only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from engine.bounds import PlanFigures
    from engine.plan import Plan

_KINDS = ("attention", "experts", "mlp", "embedding", "other")
_COLOURS = ("#4e79a7", "#e15759", "#f28e2b", "#59a14f", "#9c755f")
_MOST_LINES = 24  # ranks of a side that are still drawn one by one

Traffic = dict[tuple[int, int], Counter[str]]
"""(source rank, target rank) -> kind of tensor -> bytes."""


def traffic(plan: Plan) -> Traffic:
    """Return the bytes that every pair of ranks exchanges, by kind of tensor."""
    from engine.layout import DTYPE_BYTES

    found: Traffic = {}
    for bucket in plan.buckets:
        kinds = found.setdefault((bucket.source_rank, bucket.target_rank), Counter())
        for copy in bucket.copies:
            kinds[_kind(copy.tensor)] += copy.box.num_elements * DTYPE_BYTES[bucket.dtype]
    return found


def draw(plan: Plan, figures: PlanFigures, path: Path) -> None:
    """Draw a plan into an .svg or .png file.

    Left, who sends to whom: a line for every pair (its width the bytes), or above 24 ranks a side a map of all pairs.
    Right, what every target rank receives, by kind of tensor, what it keeps, and its lower bound.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--picture needs matplotlib: pip install 'asyncrl[plot]'") from error

    pairs = traffic(plan)
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(
        f"{plan.source.name} → {plan.target.name}: {sum(figures.received) / 2**30:.2f} GiB moved, "
        f"{figures.bytes_over_bound:.3f} x the bound, busiest sender {figures.busiest_over_best:.3f} x the best"
    )
    if max(plan.source.num_ranks, plan.target.num_ranks) <= _MOST_LINES:
        _draw_lines(left, plan, pairs)
    else:
        _draw_map(left, plan, pairs)
    _draw_receivers(right, plan, figures, pairs)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_lines(axes: Axes, plan: Plan, pairs: Traffic) -> None:
    """Two columns of ranks and a line for every pair, in the colour of what it carries most of."""
    most = max((sum(kinds.values()) for kinds in pairs.values()), default=1)
    heights = [
        [(rank + 0.5) / layout.num_ranks for rank in range(layout.num_ranks)] for layout in (plan.source, plan.target)
    ]
    for (source, target), kinds in sorted(pairs.items()):
        (kind, _), total = kinds.most_common(1)[0], sum(kinds.values())
        ends = heights[0][source], heights[1][target]
        axes.plot((0, 1), ends, color=_COLOURS[_KINDS.index(kind)], linewidth=0.4 + 6 * total / most, alpha=0.55)

    sides = (("train", 0, "right", -0.03), ("infer", 1, "left", 1.03))
    for (side, x, align, place), column in zip(sides, heights, strict=True):
        axes.scatter([x] * len(column), column, s=60, color="black", zorder=3)
        for rank, height in enumerate(column):
            axes.text(place, height, f"{side} {rank}{_device(plan, side, rank)}", ha=align, va="center", fontsize=8)
    axes.set_xlim(-0.35, 1.35)
    axes.set_ylim(1, 0)
    axes.set_axis_off()
    axes.set_title("who sends to whom (width: bytes, colour: mostly what)")


def _draw_map(axes: Axes, plan: Plan, pairs: Traffic) -> None:
    """A map of all pairs, MiB as colour."""
    import numpy as np

    sent = np.zeros((plan.source.num_ranks, plan.target.num_ranks))
    for (source, target), kinds in pairs.items():
        sent[source, target] = sum(kinds.values()) / 2**20
    shown = axes.imshow(np.where(sent > 0, sent, np.nan), aspect="auto", interpolation="nearest", cmap="viridis_r")
    axes.figure.colorbar(shown, ax=axes, label="MiB")
    axes.set_xlabel("infer rank")
    axes.set_ylabel("train rank")
    axes.set_title("who sends to whom")


def _draw_receivers(axes: Axes, plan: Plan, figures: PlanFigures, pairs: Traffic) -> None:
    """A stacked bar for every target rank, with its bound as a mark."""
    ranks = list(range(plan.target.num_ranks))
    received = [Counter[str]() for _ in ranks]
    for (_, target), kinds in pairs.items():
        received[target].update(kinds)

    bottom = [0.0] * len(ranks)
    for kind, colour in zip(_KINDS, _COLOURS, strict=True):
        height = [received[rank][kind] / 2**30 for rank in ranks]
        if any(height):
            axes.bar(ranks, height, bottom=bottom, color=colour, label=kind, width=0.8)
        bottom = [low + size for low, size in zip(bottom, height, strict=True)]
    if any(figures.kept):
        kept = [size / 2**30 for size in figures.kept]
        axes.bar(ranks, kept, bottom=bottom, color="#dddddd", label="kept on its device", width=0.8)
    bound = [size / 2**30 for size in figures.bound]
    axes.scatter(ranks, bound, marker="_", color="black", s=90, label="lower bound", zorder=3)
    axes.set_xlabel("infer rank")
    axes.set_ylabel("GiB")
    axes.set_title("what each infer rank receives")
    axes.locator_params(axis="x", integer=True)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4)


def _device(plan: Plan, side: str, rank: int) -> str:
    """Name a rank's device where ranks are placed."""
    if plan.placement is None:
        return ""

    devices = plan.placement.source_devices if side == "train" else plan.placement.target_devices
    return f" @ device {devices[rank]}"


def _kind(tensor: str) -> str:
    for kind, parts in (
        ("attention", ("self_attn",)),
        ("experts", (".experts.",)),
        ("mlp", (".mlp.",)),
        ("embedding", ("embed_tokens", "lm_head")),
    ):
        if any(part in tensor for part in parts):
            return kind
    return "other"
