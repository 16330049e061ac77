"""`hpctrain bench allreduce` and similar commands: from options to a table, JSON and a plot."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hpctrain import collectives
from hpctrain.collectives import DTYPES, OPERATIONS
from hpctrain.collectives.reductions.operations import can_mpi_reduce
from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.names import counted
from hpctrain.tools.bench import base, rivals, sweep, units
from hpctrain.tools.bench.base import check_host_memory, split_words
from hpctrain.tools.bench.measured_collectives import COLLECTIVES, NATIVE, NATIVE_UNBOUND
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


def parse_options(
    operation: str,
    sizes_text: str,
    algorithms: str,
    rivals_text: str,
    dtype: str,
    op: str,
    buffers: str,
    **bench: Any,
) -> sweep.SweepPlan:
    """Return the validated options; a UsageError names the expected and the nearest value."""
    collective = COLLECTIVES[operation]
    names = list(split_words(algorithms))
    for name in names:
        config.pick(dict.fromkeys(collective.names), name, "algorithm")
    import ml_dtypes  # late: other commands do not need it

    config.pick(dict.fromkeys(DTYPES), dtype, "dtype")
    parsed_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    config.pick(dict.fromkeys(OPERATIONS), op, "op")
    collectives.operation(op, parsed_dtype)
    plan = sweep.SweepPlan(
        collective,
        units.parse_sizes(sizes_text),
        names,
        parsed_dtype,
        op,
        config.pick(NODE_MEMORY_BY_BUFFERS, buffers, "--buffers"),
        rivals=rivals.parse_names(rivals_text),
        **bench,
    )
    if not names and not plan.rivals:
        raise UsageError(f"--algorithms: choose some of {', '.join(collective.names)}")
    return plan


def run(world: World, plan: sweep.SweepPlan) -> list[dict[str, Any]]:
    """Measure, print, save and return the rows; collective."""
    check_host_memory(world, max(plan.sizes), bool(plan.rivals))
    base.check_writable(world, plan.json, plan.plot)
    natives = _skipped_natives(plan)
    with rivals.joined(world, plan.rivals, partial(_refusal, plan), natives) as (
        joined_rivals,
        rival_descriptions,
    ):
        plan = replace(plan, algorithms=[name for name in plan.algorithms if name not in natives])
        title = _title(world, plan)
        groups = sweep.run(world, plan, joined_rivals)
        rows = base.print_groups(world, title, base.COLLECTIVE_COLUMNS, groups, len(plan.sizes))
    kind = world.memory.kind if plan.in_node_memory else None
    buffers = f"node ({kind})" if kind else "private"
    facts = {"buffers": buffers, "timed": TIMING_METHOD, "rivals": rival_descriptions}
    base.save(world, plan, rows, title, lambda plot: plot.draw_size_plot, facts)
    return rows


def _refusal(plan: sweep.SweepPlan, library: rivals.Rival) -> str:
    """Return why `library` cannot be measured; empty if it can."""
    is_supported = plan.op in RIVAL_OPERATIONS and plan.dtype.name in RIVAL_DTYPES
    if is_supported and library.offers(plan.collective.name, plan.dtype):
        return ""
    return f"offers no {plan.collective.name} ({plan.op}) of {plan.dtype.name} in place"


def _skipped_natives(plan: sweep.SweepPlan) -> dict[str, str]:
    """Return {algorithm: reason} for native contenders if MPI lacks the operation."""
    if can_mpi_reduce(np.empty(0, plan.dtype), collectives.operation(plan.op, plan.dtype)):
        return {}
    natives = [name for name in (NATIVE, NATIVE_UNBOUND) if name in plan.algorithms]
    return dict.fromkeys(natives, f"MPI has no {plan.op} of {plan.dtype.name}")


def _title(world: World, plan: sweep.SweepPlan) -> str:
    node_text = counted(len(world.main.nodes), "node")
    op_text = f", {plan.op}" if plan.collective.name in ("allreduce", "reduce-scatter") else ""
    return (
        f"{plan.collective.name} of {plan.dtype.name}{op_text}, {world.size} ranks on {node_text}"
    )
