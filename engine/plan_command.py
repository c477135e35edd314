"""`python -m engine.plan`: what it costs to bring a model from a training layout to an inference layout.

Needs a config.json, no weights, no torch, no device. Prints a table, or the same figures as JSON, or draws the picture.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.layout import LayoutError

if TYPE_CHECKING:
    from rich.table import Table

    from engine.bounds import PlanFigures
    from engine.layout import Layout
    from engine.placement import Placement
    from engine.plan import Plan

MODELS = Path(__file__).parent / "models"

_TRAIN_SIZES = ("tp", "pp", "dp", "ep", "etp", "cp", "vpp")
_EXAMPLES = """\
examples:
  python -m engine.plan --model Qwen2.5-7B --train tp=4,pp=2 --infer tp=2
  python -m engine.plan --model Qwen3-235B-A22B --train tp=4,pp=2,dp=4,ep=16,etp=1 --infer tp=8,ep=on --nodes 8
  python -m engine.plan --model Llama-3-70B --train tp=8,pp=4 --infer tp=4 --colocated --picture plan.svg
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """A plan with its figures and what it took to make it; `cpu_s` is of the three times together."""

    plan: Plan
    figures: PlanFigures
    model: str
    verified: bool
    layout_s: float
    placement_s: float
    plan_s: float
    cpu_s: float

    def to_json(self) -> dict[str, object]:
        """Return the figures as plain values; bytes are integers, times seconds."""
        figures, plan = self.figures, self.plan
        return {
            "model": self.model,
            "source": plan.source.name,
            "target": plan.target.name,
            "colocated": bool(plan.local),
            "layout_verified": self.verified,
            "source_ranks": plan.source.num_ranks,
            "target_ranks": plan.target.num_ranks,
            "bucket_bytes": plan.bucket_bytes,
            "bytes_moved": sum(figures.received),
            "lower_bound": sum(figures.bound),
            "bytes_over_bound": figures.bytes_over_bound,
            "bytes_moved_per_rank": list(figures.received),
            "lower_bound_per_rank": list(figures.bound),
            "bytes_kept_per_rank": list(figures.kept),
            "bytes_sent_per_rank": list(figures.sent),
            "bytes_between_nodes": figures.between_nodes,
            "busiest_sender": max(figures.sent),
            "busiest_best": figures.best_busiest,
            "busiest_over_best": figures.busiest_over_best,
            "receiver_bytes": figures.receiver_bytes,
            "staging_full_sender": figures.full_source,
            "staging_full_receiver": figures.full_target,
            "staging_bounded_sender": figures.bounded_source,
            "staging_bounded_receiver": figures.bounded_target,
            "num_copies": figures.num_copies,
            "num_buckets": figures.num_buckets,
            "target_devices": None if plan.placement is None else list(plan.placement.target_devices),
            "layout_s": round(self.layout_s, 4),
            "placement_s": round(self.placement_s, 4),
            "plan_s": round(self.plan_s, 4),
            "cpu_s": round(self.cpu_s, 4),
            "peak_memory_bytes": _peak_memory(),
            "plan_hash": plan.hash,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 2 with one line on stderr for what cannot be planned.

    Args:
        argv: without the program's name; None takes the process's own.
    """
    options = _parser().parse_args(argv)
    collects = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and the collector would walk the growing plan again and again
    try:
        return _run(options)
    except (LayoutError, OSError, ImportError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    finally:
        if collects:
            gc.enable()


def _run(options: argparse.Namespace) -> int:
    if options.picture is not None and options.picture.suffix not in {".svg", ".png"}:
        raise LayoutError(f"--picture: {options.picture} must end in .svg or .png")

    report = _report(options)
    if options.picture is not None:
        from engine.plan_picture import draw

        draw(report.plan, report.figures, options.picture)

    if not options.quiet:
        from rich.console import Console

        Console(highlight=False).print(_table(report))
        if options.picture is not None:
            print(f"picture: {options.picture}")

    if options.json:
        print(json.dumps(report.to_json()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.plan",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shipped = ", ".join(sorted(path.stem for path in MODELS.glob("*.json")))
    parser.add_argument("--model", required=True, help=f"a shipped model ({shipped}) or the path of a config.json")
    parser.add_argument(
        "--train",
        required=True,
        metavar="SIZES",
        help="Megatron: tp=8,pp=4,dp=2,ep=2,etp=1,cp=1,vpp=2,layers=16-15-15-15 (layers of each stage; default even)",
    )
    parser.add_argument(
        "--infer",
        required=True,
        metavar="SIZES",
        help="one vLLM replica: tp=4,pp=2,ep=on; replicas=N plans all N at once instead of one that they share",
    )
    parser.add_argument(
        "--colocated", action="store_true", help="same devices for both; fills them with replicas, placed to move least"
    )
    parser.add_argument("--nodes", type=int, help="spread the devices over so many nodes, training ranks first")
    parser.add_argument("--bucket-mb", type=float, default=64.0, help="bucket size in MiB (default 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quiet", action="store_true", help="leave the table out")
    parser.add_argument("--picture", type=Path, help="draw who sends what to whom into this .svg or .png")
    return parser


def _report(options: argparse.Namespace) -> _Report:
    from engine.bounds import plan_figures
    from engine.plan import make_plan

    config = read_model(options.model)
    bucket_bytes = int(options.bucket_mb * 2**20)
    if bucket_bytes < 1:
        raise LayoutError(f"--bucket-mb must be > 0, got {options.bucket_mb}")

    begin, cpu_begin = time.perf_counter(), time.process_time()
    source, target = _layouts(config, options)
    laid_out = time.perf_counter()
    placement = _placement(source, target, options)
    placed = time.perf_counter()
    plan = make_plan(source, target, bucket_bytes=bucket_bytes, placement=placement)
    planned, cpu_planned = time.perf_counter(), time.process_time()
    return _Report(
        plan=plan,
        figures=plan_figures(plan),
        model=options.model,
        verified=source.verified and target.verified,
        layout_s=laid_out - begin,
        placement_s=placed - laid_out,
        plan_s=planned - placed,
        cpu_s=cpu_planned - cpu_begin,
    )


def read_model(name: str) -> dict[str, Any]:
    """Return the config.json of a shipped model, or of a path.

    Raises:
        LayoutError: neither is there, or it is no JSON object, or a key in it is there twice.
    """
    path = MODELS / f"{name}.json" if (MODELS / f"{name}.json").is_file() else Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        shipped = ", ".join(sorted(path.stem for path in MODELS.glob("*.json")))
        raise LayoutError(f"--model {name}: no such file, and not one of the shipped models: {shipped}")

    try:
        config = json.loads(path.read_text(), object_pairs_hook=_unique)
    except ValueError as error:
        raise LayoutError(f"--model {name}: {error}") from error

    if not isinstance(config, dict):
        raise LayoutError(f"--model {name}: {path} holds a {type(config).__name__}, not an object")

    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise LayoutError(f"{key} is there twice: {found[key]!r} and {value!r}")

        found[key] = value
    return found


def _layouts(config: Mapping[str, Any], options: argparse.Namespace) -> tuple[Layout, Layout]:
    """Build both sides; the target with all its replicas if they are planned at once."""
    from engine.families import megatron_layout, vllm_layout
    from engine.placement import repeated

    train = _sizes("--train", options.train, (*_TRAIN_SIZES, "layers"))
    infer = _sizes("--infer", options.infer, ("tp", "pp", "ep", "replicas"))
    replicas = infer.pop("replicas", None)
    parallel: dict[str, Any] = {"tp": 1, "pp": 1, "dp": 1} | train
    layers = parallel.pop("layers", None)
    if layers is not None:
        parallel["layers_per_stage"] = layers

    source = megatron_layout(config, **parallel)
    target = vllm_layout(config, **({"tp": 1} | infer))
    if replicas is None and options.colocated:
        replicas, rest = divmod(source.num_ranks, target.num_ranks)
        if rest:
            raise LayoutError(
                f"--colocated: {source.num_ranks} devices cannot be filled with replicas of {target.num_ranks} ranks"
            )

    return source, target if replicas is None else repeated(target, replicas)


def _sizes(option: str, text: str, known: Sequence[str]) -> dict[str, Any]:
    """Read `tp=8,pp=4,ep=on`: sizes are integers, `ep` of --infer is on or off, `layers` is 16-15-15."""
    found: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in known:
            raise LayoutError(f"{option}: {name!r} is not one of {', '.join(known)}")

        if name in found:
            raise LayoutError(f"{option}: {name} is there twice: {found[name]} and {value}")

        if name == "layers":
            found[name] = tuple(_integer(option, name, part) for part in value.split("-"))
        elif option == "--infer" and name == "ep":
            if value not in {"on", "off"}:
                raise LayoutError(f"{option}: ep is on or off, got {value!r}")

            found[name] = value == "on"
        else:
            found[name] = _integer(option, name, value)
    return found


def _integer(option: str, name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise LayoutError(f"{option}: {name} must be an integer, got {value!r}")

    return int(value)


def _placement(source: Layout, target: Layout, options: argparse.Namespace) -> Placement | None:
    from engine.colocation import place_colocated
    from engine.placement import Placement

    num_devices = source.num_ranks if options.colocated else source.num_ranks + target.num_ranks
    if options.nodes is not None and not 1 <= options.nodes <= num_devices:
        raise LayoutError(f"--nodes must be in [1, {num_devices}], got {options.nodes}")

    per_node = -(-num_devices // (options.nodes or 1))
    if options.colocated:
        return place_colocated(source, target, devices_per_node=per_node)

    if options.nodes is None:
        return None

    return Placement(
        source_devices=tuple(range(source.num_ranks)),
        target_devices=tuple(range(source.num_ranks, num_devices)),
        device_nodes=tuple(device // per_node for device in range(num_devices)),
    )


def _table(report: _Report) -> Table:
    from rich.table import Table

    plan, figures = report.plan, report.figures
    mark = "" if report.verified else "\nlayout unverified: not checked against the frameworks' own loaders"
    title = f"{report.model}: {plan.source.name} -> {plan.target.name}{mark}"
    table = Table(title=title, title_justify="left")
    for column in ("", "value", "bound", "ratio"):
        table.add_column(column, justify="left" if column == "" else "right")

    def row(name: str, value: object, bound: object = "", ratio: object = "") -> None:
        table.add_row(name, str(value), str(bound), str(ratio))

    row("bytes moved, all ranks", _size(sum(figures.received)), _size(sum(figures.bound)), _3(figures.bytes_over_bound))
    worst = max(range(len(figures.received)), key=lambda rank: figures.received[rank])
    most, bound = figures.received[worst], figures.bound[worst]
    row("bytes moved, busiest receiver", _size(most), _size(bound), _3(most / bound if bound else 1.0))
    row("busiest sender", _size(max(figures.sent)), _size(figures.best_busiest), _3(figures.busiest_over_best))
    if plan.placement is not None:
        row("kept on its device, all ranks", _size(sum(figures.kept)))
        row("between nodes", _size(figures.between_nodes))
    unit = figures.receiver_bytes
    row("receiver's parameters", _size(unit))
    for name, staged in (
        ("full: sender", figures.full_source),
        ("full: receiver", figures.full_target),
        ("bounded: sender", figures.bounded_source),
        ("bounded: receiver", figures.bounded_target),
    ):
        row(f"staging {name}", _size(staged), "", f"{staged / unit:.3f} x receiver")
    row("copies", f"{figures.num_copies:,}")
    row(f"buckets of {_size(plan.bucket_bytes)}", f"{figures.num_buckets:,}")
    row("layouts made in", f"{report.layout_s:.3f} s")
    if plan.placement is not None:
        row("ranks placed in", f"{report.placement_s:.3f} s")
    row("planned in", f"{report.plan_s:.3f} s")
    row("CPU time of all that", f"{report.cpu_s:.3f} s")
    row("peak memory of this process", _size(_peak_memory()))
    return table


def _size(num_bytes: int) -> str:
    """Format bytes, for instance "1.50 GiB"."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"

        value /= 1024
    return f"{value:.2f} GiB"


def _3(ratio: float) -> str:
    return f"{ratio:.3f}"


def _peak_memory() -> int:
    """Bytes of this process's largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
