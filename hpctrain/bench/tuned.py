"""The tuning table as people read it: who is taken for which size, and how much that gains."""

from __future__ import annotations

import sys
from pathlib import Path

import rich.table
from rich.console import Console

from hpctrain import progress, stairs
from hpctrain.bench.sizes import shown
from hpctrain.tuning import choose, cost, select
from hpctrain.tuning.table import Table

KINDS = {True: "in node memory", False: "plain arrays"}
GPU_KINDS = {True: "neighbours see it", False: "plain arrays"}
PLANES = [1 << 20, 16 << 20, 256 << 20]
WIDTH = 110  #: where nobody sits in front of it


def show(found: Table, path: Path) -> None:
    """Print `found`, which lies in `path`."""
    terminal = progress.console()
    width = terminal.width if terminal.is_terminal else WIDTH
    out = Console(file=sys.stdout, force_terminal=terminal.is_terminal, width=width)
    here = found.fingerprint
    out.print(f"{here.mpi}, {here.layout}; {here.cpu}, {here.cores} cores; {found.date}")
    if here.on_gpu:
        out.print(f"arrays on {here.device}; {here.paths}")
    out.print(_table(found))
    for where, constants in (("inside a node", found.node), ("between nodes", found.across)):
        if constants is not None:
            out.print(f"{where}: {_constants(constants)}")
    out.print(f"buckets: {_buckets(found)}")
    if found.noisy is not None:
        out.print(noise(found.noisy), soft_wrap=True)
    out.print(f"table: {path}", soft_wrap=True)


def noise(spread: float) -> str:
    """Return what people should know of a table that was made on a busy machine."""
    return (
        f"noisy: repeats lay {spread:.0%} of their median apart (quartiles), expected at most "
        f"{choose.NOISY:.0%}: something else kept the machine busy; tune again when it is quiet"
    )


def heading(found: Table, kind: bool) -> str:
    """Return what arrays are called that lie in memory of the node, or do not."""
    return (GPU_KINDS if found.fingerprint.on_gpu else KINDS)[kind]


def kinds(found: Table) -> dict[bool, stairs.Times]:
    """Return seconds by size and algorithm, of arrays in node memory and of plain ones."""
    by = {kind: [row for row in found.rows if row.in_memory == kind] for kind in KINDS}
    return {kind: choose.times(rows) for kind, rows in by.items() if rows}


def _table(found: Table) -> rich.table.Table:
    """Return a row per size: for either kind the algorithm taken, its time, the gain over MPI's.

    MPI's own reduces no arrays of GPUs.
    """
    made, by, by_mpi = rich.table.Table(), kinds(found), not found.fingerprint.on_gpu
    made.add_column("size", justify="right")
    for kind in by:
        made.add_column(f"{heading(found, kind)}: takes")
        made.add_column("us", justify="right")
        if by_mpi:
            made.add_column("x native", justify="right")
    taken = {kind: stairs.taken_at(times) for kind, times in by.items()}
    for nbytes in sorted({row.bytes for row in found.rows}):
        words = [_words(by[kind].get(nbytes, {}), taken[kind].get(nbytes, "")) for kind in by]
        made.add_row(shown(nbytes), *(word for three in words for word in three[: 2 + by_mpi]))
    return made


def _words(seconds: dict[str, float], name: str) -> tuple[str, str, str]:
    if name not in seconds:
        return "-", "-", "-"
    gain = f"{seconds['native'] / seconds[name]:.2f}" if "native" in seconds else "-"
    return name, f"{seconds[name] * 1e6:.4g}", gain


def _constants(one: cost.Machine) -> str:
    return (
        f"alpha {one.alpha * 1e6:.3g} us, beta {1e-9 / one.beta:.3g} GB/s, "
        f"gamma {1e-9 / one.gamma:.3g} GB/s"
    )


def _buckets(found: Table) -> str:
    """Return how long buckets are for planes of some lengths."""
    told = [(shown(plane), select.bucket_of(found.buckets, plane)) for plane in PLANES]
    return ", ".join(f"{shown(nbytes)} of a plane of {plane}" for plane, nbytes in told)
