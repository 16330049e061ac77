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
from hpctrain.bench.measured_collectives import COLLECTIVES, NATIVE, NATIVE_PLAIN
from hpctrain.collectives import DTYPES, OPERATIONS
from hpctrain.collectives.reductions.operations import reduced_by_mpi
from hpctrain.core.errors import UsageError
from hpctrain.tuning.measure import COLD_BYTES
from hpctrain.world import World

BUFFERS = {"node": True, "private": False}
TIMED = (
    "per round, after a call that does not count, all ranks start at a barrier and make `calls` "
    "calls back to back; the slowest rank's time / calls counts; contenders and floor take "
    "turns; buffers hold zeros; cold: one call after a barrier, before which each rank has written "
    f"{COLD_BYTES} bytes of other arrays"
)
RIVALS_OPERATIONS = ("sum", "min", "max")
RIVALS_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
MATPLOTLIB = "--plot needs matplotlib; run: pip install 'hpctrain[report]'"


@dataclass(frozen=True)
class Options:
    """Options of the command line, validated; this needs no MPI."""

    plan: sweep.SweepPlan
    rivals: tuple[str, ...]
    json: Path | None
    plot: Path | None


def check(
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
    """Return the validated options; raise UsageError with the expected and the nearest value."""
    collective = COLLECTIVES[operation]
    names = list(split_words(algorithms))
    for name in names:
        config.pick(dict.fromkeys(collective.names), name, "algorithm")
    kind = parse_dtype(dtype)
    config.pick(dict.fromkeys(OPERATIONS), op, "op")
    collectives.operation(op, kind)
    plan = sweep.SweepPlan(
        collective,
        message_sizes.parse(sizes_text),
        names,
        kind,
        op,
        rounds_of("--iterations", iterations, 1),
        rounds_of("--warm-up", warm_up, 0),
        config.pick(BUFFERS, buffers, "--buffers"),
    )
    rival_names = rivals.names(rivals_text)
    if not names and not rival_names:
        raise UsageError(f"--algorithms: choose some of {', '.join(collective.names)}")
    must_draw(plot)
    return Options(plan, tuple(rival_names), json, plot)


def run(world: World, options: Options) -> list[dict[str, Any]]:
    """Measure, show and save the rows, and return them. Collective."""
    plan = options.plan
    memory_check.check(world, max(plan.sizes), bool(options.rivals))
    output.must_be_writable(world, options.json, options.plot)
    joined, skipped = rivals.join(world, options.rivals)
    able = {name: library for name, library in joined.items() if _offered(plan, library)}
    skipped |= _impossible(plan) | {n: _missing_text(plan) for n in joined if n not in able}
    plan = replace(plan, algorithms=[name for name in plan.algorithms if name not in skipped])
    about = rivals.about(able, skipped)
    output.print_lines(world, [f"# {name}: {text}" for name, text in about.items()])
    title = _title(world, plan)
    try:
        printer = output.RowPrinter(world, title, output.COLLECTIVE, len(plan.sizes))
        rows = printer.print_groups(sweep.run(world, plan, able))
    finally:
        for library in joined.values():
            library.close()
    report = output.report(world, rows, buffers=_buffers(world, plan), timed=TIMED, rivals=about)
    output.write(world, options.json, report)
    if options.plot is not None and world.rank == 0:
        import_module("hpctrain.bench.plot").draw(rows, title, options.plot)
    return rows


def split_words(text: str) -> Iterable[str]:
    """Return the comma-separated words of `text` without duplicates."""
    return dict.fromkeys(word.strip() for word in text.split(",") if word.strip())


def rounds_of(flag: str, number: int, minimum: int) -> int:
    """Return `number`; raise UsageError if it is less than `minimum`."""
    if number < minimum:
        raise UsageError(f"{flag}: expected at least {minimum}, seen {number}")
    return number


def parse_dtype(name: str) -> np.dtype:
    """Return the dtype called `name`; bfloat16 needs the package ml_dtypes."""
    config.pick(dict.fromkeys(DTYPES), name, "dtype")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        return np.dtype(import_module("ml_dtypes").bfloat16)
    except ImportError:
        raise UsageError("--dtype bfloat16 needs ml_dtypes: pip install ml_dtypes") from None


def must_draw(plot: Path | None) -> None:
    """Raise UsageError if `plot` has another suffix than .png or .svg, or without matplotlib."""
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot: expected a name that ends in .png or .svg, seen '{plot}'")
    try:
        import_module("hpctrain.bench.plot")
    except ImportError as error:
        raise UsageError(f"{MATPLOTLIB} ({error})") from None


def _impossible(plan: sweep.SweepPlan) -> dict[str, str]:
    """Return {algorithm: reason} of MPI's own collective where it lacks the same operation."""
    if reduced_by_mpi(np.empty(0, plan.dtype), collectives.operation(plan.op, plan.dtype)):
        return {}
    natives = [name for name in (NATIVE, NATIVE_PLAIN) if name in plan.algorithms]
    return dict.fromkeys(natives, f"MPI has not the same {plan.op} of {plan.dtype.name}")


def _offered(plan: sweep.SweepPlan, library: rivals.Rival) -> bool:
    supported = plan.op in RIVALS_OPERATIONS and plan.dtype.name in RIVALS_DTYPES
    return supported and library.offers(plan.collective.name, plan.dtype)


def _missing_text(plan: sweep.SweepPlan) -> str:
    return f"offers no {plan.collective.name} ({plan.op}) of {plan.dtype.name} in place"


def _buffers(world: World, plan: sweep.SweepPlan) -> str:
    kind = world.memory.kind if plan.in_node_memory else None
    return f"node ({kind})" if kind else "private"


def _title(world: World, plan: sweep.SweepPlan) -> str:
    nodes = len(world.main.nodes)
    on_nodes = "1 node" if nodes == 1 else f"{nodes} nodes"
    reduced = f", {plan.op}" if plan.collective.name in ("allreduce", "reduce-scatter") else ""
    return f"{plan.collective.name} of {plan.dtype.name}{reduced}, {world.size} ranks on {on_nodes}"
