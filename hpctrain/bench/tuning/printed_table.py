"""The printed tuning table: the algorithm chosen for each size, and its gain over MPI's own."""

from __future__ import annotations

import sys
from pathlib import Path

import rich.table
from rich.console import Console

from hpctrain.bench.message_sizes import size_text
from hpctrain.core import progress, thresholds
from hpctrain.cost_model import cost
from hpctrain.tuning import choose, select
from hpctrain.tuning.table import Table

KINDS = {True: "in node memory", False: "plain arrays"}
GPU_KINDS = {True: "neighbours see it", False: "plain arrays"}
PLANES = [1 << 20, 16 << 20, 256 << 20]
WIDTH = 110  #: if the output is no terminal


def show(table: Table, path: Path) -> None:
    """Print `table` of file `path`."""
    terminal = progress.console()
    width = terminal.width if terminal.is_terminal else WIDTH
    out = Console(file=sys.stdout, force_terminal=terminal.is_terminal, width=width)
    fingerprint = table.fingerprint
    out.print(
        f"{fingerprint.mpi}, {fingerprint.layout}; "
        f"{fingerprint.cpu}, {fingerprint.cores} cores; {table.date}"
    )
    if fingerprint.on_gpu:
        out.print(f"arrays on {fingerprint.device}; {fingerprint.paths}")
    out.print(_table(table))
    for label, constants in (("inside a node", table.node), ("between nodes", table.across)):
        if constants is not None:
            out.print(f"{label}: {_constants(constants)}")
    out.print(f"buckets: {_buckets(table)}")
    if table.noisy is not None:
        out.print(noise(table.noisy), soft_wrap=True)
    out.print(f"table: {path}", soft_wrap=True)


def noise(spread: float) -> str:
    """Return the warning for a table measured on a busy machine."""
    return (
        f"noisy: the quartiles of repeats differ by {spread:.0%} of the median, expected at most "
        f"{choose.NOISY:.0%}: something else kept the machine busy; tune again when it is quiet"
    )


def heading(table: Table, kind: bool) -> str:
    """Return the heading of arrays in node memory (`kind`) or elsewhere."""
    return (GPU_KINDS if table.fingerprint.on_gpu else KINDS)[kind]


def kinds(table: Table) -> dict[bool, thresholds.Times]:
    """Return seconds by size and algorithm, for arrays in node memory and for plain ones."""
    rows_by_kind = {kind: [row for row in table.rows if row.in_memory == kind] for kind in KINDS}
    return {kind: choose.times(rows) for kind, rows in rows_by_kind.items() if rows}


def _table(table: Table) -> rich.table.Table:
    """Return a row per size: for either kind the chosen algorithm, its time, the gain over MPI's.

    MPI's own reduces no arrays of GPUs.
    """
    result, times_by_kind, by_mpi = rich.table.Table(), kinds(table), not table.fingerprint.on_gpu
    result.add_column("size", justify="right")
    for kind in times_by_kind:
        result.add_column(f"{heading(table, kind)}: takes")
        result.add_column("us", justify="right")
        if by_mpi:
            result.add_column("x native", justify="right")
    choices = {kind: thresholds.choices_at(times) for kind, times in times_by_kind.items()}
    for nbytes in sorted({row.bytes for row in table.rows}):
        words = [
            _words(times_by_kind[kind].get(nbytes, {}), choices[kind].get(nbytes, ""))
            for kind in times_by_kind
        ]
        result.add_row(
            size_text(nbytes), *(word for cell_group in words for word in cell_group[: 2 + by_mpi])
        )
    return result


def _words(seconds: dict[str, float], name: str) -> tuple[str, str, str]:
    if name not in seconds:
        return "-", "-", "-"
    gain = f"{seconds['native'] / seconds[name]:.2f}" if "native" in seconds else "-"
    return name, f"{seconds[name] * 1e6:.4g}", gain


def _constants(machine: cost.Machine) -> str:
    return (
        f"alpha {machine.alpha * 1e6:.3g} us, beta {1e-9 / machine.beta:.3g} GB/s, "
        f"gamma {1e-9 / machine.gamma:.3g} GB/s"
    )


def _buckets(table: Table) -> str:
    """Return the bucket lengths for planes of several lengths."""
    lengths = [(size_text(plane), select.bucket_of(table.buckets, plane)) for plane in PLANES]
    return ", ".join(f"{size_text(nbytes)} of a plane of {plane}" for plane, nbytes in lengths)
