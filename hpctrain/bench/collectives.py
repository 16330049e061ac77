"""`hpctrain bench allreduce` and similar commands: from options to a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import collectives, config
from hpctrain.bench import memory_check, message_sizes, output, rivals, sweep
from hpctrain.bench.measured_collectives import COLLECTIVES, NATIVE, NATIVE_UNBOUND
from hpctrain.collectives import DTYPES, OPERATIONS
from hpctrain.collectives.reductions.operations import can_mpi_reduce
from hpctrain.core.errors import UsageError
from hpctrain.tuning.measure import COLD_BYTES
from hpctrain.world import World

NODE_MEMORY_BY_BUFFERS = {"node": True, "private": False}
TIMING_METHOD = (
    "per round, after a warm-up call, all ranks start at a barrier and make `calls` calls back to "
    "back; the slowest rank's time / calls counts; contenders and floor take turns; buffers hold "
    f"zeros; cold: each rank writes {COLD_BYTES} bytes of other arrays, then one call after a "
    "barrier is timed"
)
RIVAL_OPERATIONS = ("sum", "min", "max")
RIVAL_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
MATPLOTLIB_HINT = "--plot needs matplotlib; run: pip install 'hpctrain[report]'"


@dataclass(frozen=True)
class Options:
    """Validated options of the command line; validation needs no MPI."""

    plan: sweep.SweepPlan
    rivals: tuple[str, ...]
    json: Path | None
    plot: Path | None


def parse_options(
    operation: str,
    sizes_text: str,
    algorithms: str,
    rivals_text: str,
    dtype: str,
    op: str,
    buffers: str,
    iterations: int,
    warm_up: int,
    json: Path | None,
    plot: Path | None,
) -> Options:
    """Return the validated options; a UsageError names the expected and the nearest value."""
    collective = COLLECTIVES[operation]
    names = list(split_words(algorithms))
    for name in names:
        config.pick(dict.fromkeys(collective.names), name, "algorithm")
    parsed_dtype = parse_dtype(dtype)
    config.pick(dict.fromkeys(OPERATIONS), op, "op")
    collectives.operation(op, parsed_dtype)
    plan = sweep.SweepPlan(
        collective,
        message_sizes.parse(sizes_text),
        names,
        parsed_dtype,
        op,
        require_minimum("--iterations", iterations, 1),
        require_minimum("--warm-up", warm_up, 0),
        config.pick(NODE_MEMORY_BY_BUFFERS, buffers, "--buffers"),
    )
    rival_names = rivals.parse_names(rivals_text)
    if not names and not rival_names:
        raise UsageError(f"--algorithms: choose some of {', '.join(collective.names)}")
    check_plot_path(plot)
    return Options(plan, tuple(rival_names), json, plot)


def run(world: World, options: Options) -> list[dict[str, Any]]:
    """Measure, print, save and return the rows; collective."""
    plan = options.plan
    memory_check.check_host_memory(world, max(plan.sizes), bool(options.rivals))
    output.check_writable(world, options.json, options.plot)
    joined_rivals, skip_reasons = rivals.join(world, options.rivals)
    supported_rivals = {
        name: library for name, library in joined_rivals.items() if _is_offered(plan, library)
    }
    skip_reasons |= _skipped_natives(plan) | {
        rival_name: _not_offered_text(plan)
        for rival_name in joined_rivals
        if rival_name not in supported_rivals
    }
    plan = replace(plan, algorithms=[name for name in plan.algorithms if name not in skip_reasons])
    rival_descriptions = rivals.describe(supported_rivals, skip_reasons)
    output.print_lines(world, [f"# {name}: {text}" for name, text in rival_descriptions.items()])
    title = _title(world, plan)
    try:
        printer = output.RowPrinter(world, title, output.COLLECTIVE_COLUMNS, len(plan.sizes))
        rows = printer.print_groups(sweep.run(world, plan, supported_rivals))
    finally:
        for library in joined_rivals.values():
            library.close()
    report = output.make_report(
        world,
        rows,
        output.find_noise(world, rows),
        buffers=_buffer_text(world, plan),
        timed=TIMING_METHOD,
        rivals=rival_descriptions,
    )
    output.write_json(world, options.json, report)
    if options.plot is not None and world.rank == 0:
        import_module("hpctrain.bench.plot").draw_size_plot(rows, title, options.plot)
        output.report_file(options.plot)
    return rows


def split_words(text: str) -> Iterable[str]:
    """Return the comma-separated words of `text` without duplicates."""
    return dict.fromkeys(word.strip() for word in text.split(",") if word.strip())


def require_minimum(flag: str, number: int, minimum: int) -> int:
    """Return `number`; raise UsageError if it is less than `minimum`."""
    if number < minimum:
        raise UsageError(f"{flag}: expected at least {minimum}, seen {number}")
    return number


def parse_dtype(name: str) -> np.dtype:
    """Return the dtype with this `name`; bfloat16 needs the package ml_dtypes."""
    config.pick(dict.fromkeys(DTYPES), name, "dtype")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        return np.dtype(import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise UsageError("--dtype bfloat16 needs ml_dtypes: pip install ml_dtypes") from None


def check_plot_path(plot: Path | None) -> None:
    """Raise UsageError if `plot` has another suffix than .png or .svg, or without matplotlib."""
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot: expected a name that ends in .png or .svg, seen '{plot}'")
    try:
        import_module("hpctrain.bench.plot")
    except ImportError as error:
        raise UsageError(f"{MATPLOTLIB_HINT} ({error})") from None


def _skipped_natives(plan: sweep.SweepPlan) -> dict[str, str]:
    """Return {algorithm: reason} for native contenders if MPI lacks the operation."""
    if can_mpi_reduce(np.empty(0, plan.dtype), collectives.operation(plan.op, plan.dtype)):
        return {}
    natives = [name for name in (NATIVE, NATIVE_UNBOUND) if name in plan.algorithms]
    return dict.fromkeys(natives, f"MPI has no {plan.op} of {plan.dtype.name}")


def _is_offered(plan: sweep.SweepPlan, library: rivals.Rival) -> bool:
    is_supported = plan.op in RIVAL_OPERATIONS and plan.dtype.name in RIVAL_DTYPES
    return is_supported and library.offers(plan.collective.name, plan.dtype)


def _not_offered_text(plan: sweep.SweepPlan) -> str:
    return f"offers no {plan.collective.name} ({plan.op}) of {plan.dtype.name} in place"


def _buffer_text(world: World, plan: sweep.SweepPlan) -> str:
    parsed_dtype = world.memory.kind if plan.in_node_memory else None
    return f"node ({parsed_dtype})" if parsed_dtype else "private"


def _title(world: World, plan: sweep.SweepPlan) -> str:
    nodes = len(world.main.nodes)
    node_text = "1 node" if nodes == 1 else f"{nodes} nodes"
    op_text = f", {plan.op}" if plan.collective.name in ("allreduce", "reduce-scatter") else ""
    return (
        f"{plan.collective.name} of {plan.dtype.name}{op_text}, {world.size} ranks on {node_text}"
    )
