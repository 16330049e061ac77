"""The printed tuning table: the algorithm chosen for each size, and its gain over MPI's own."""

from __future__ import annotations

from pathlib import Path

import rich.table

from hpctrain.core import progress, thresholds
from hpctrain.core.fitted_table import fit_table, make_table
from hpctrain.tools.bench.message_sizes import size_text
from hpctrain.tuning import choose, select
from hpctrain.tuning.table import Table

MEMORY_HEADINGS = {True: "in node memory", False: "plain arrays"}
GPU_MEMORY_HEADINGS = {True: "neighbours see it", False: "plain arrays"}
PLANE_BYTES = [1 << 20, 16 << 20, 256 << 20]
DEFAULT_WIDTH = 110  #: without a terminal


def print_table(table: Table, path: Path | None) -> None:
    """Print `table`, which lies in `path`; None if it was not written."""
    console = progress.stdout_console(DEFAULT_WIDTH)
    fingerprint = table.fingerprint
    console.print(
        f"{fingerprint.mpi}, {fingerprint.layout}; "
        f"{fingerprint.cpu}, {fingerprint.cores} cores; {table.date}"
    )
    if fingerprint.on_gpu:
        console.print(f"arrays on {fingerprint.device}; {fingerprint.paths}")
    console.print(fit_table(_choice_table(table), console))
    for place_text, constants in (("inside a node", table.node), ("between nodes", table.across)):
        if constants is not None:
            console.print(
                f"{place_text}: alpha {constants.alpha * 1e6:.3g} us, "
                f"beta {1e-9 / constants.beta:.3g} GB/s, gamma {1e-9 / constants.gamma:.3g} GB/s"
            )
    console.print(f"buckets: {_buckets_text(table)}")
    if table.noisy is not None:
        console.print(choose.noise_warning(table.noisy, "tune"), soft_wrap=True)
    console.print(f"table: {path or 'not written'}", soft_wrap=True)


def memory_heading(table: Table, in_memory: bool) -> str:
    """Return the heading for arrays in node memory, or for arrays elsewhere."""
    return (GPU_MEMORY_HEADINGS if table.fingerprint.on_gpu else MEMORY_HEADINGS)[in_memory]


def times_by_memory(table: Table) -> dict[bool, thresholds.Times]:
    """Return {in node memory: {bytes: {algorithm: seconds}}}."""
    rows_by_memory = {
        in_memory: [row for row in table.rows if row.in_memory == in_memory]
        for in_memory in MEMORY_HEADINGS
    }
    return {
        in_memory: choose.times_by_size(rows) for in_memory, rows in rows_by_memory.items() if rows
    }


def _choice_table(table: Table) -> rich.table.Table:
    """Return a row per size: the chosen algorithm, its time and its gain over MPI's all-reduce.

    There is no gain for arrays on GPUs: MPI's own all-reduce is not measured there.
    """
    seconds_by_memory, has_native = times_by_memory(table), not table.fingerprint.on_gpu
    takes = [f"{memory_heading(table, in_memory)}: takes" for in_memory in seconds_by_memory]
    numbers = ["us", *["x native"] * has_native]
    grid = make_table(["size", *(text for name in takes for text in (name, *numbers))], *takes)
    chosen_algorithms = {
        in_memory: thresholds.choices_at(times) for in_memory, times in seconds_by_memory.items()
    }
    for nbytes in sorted({row.bytes for row in table.rows}):
        cells = [
            _choice_cells(
                seconds_by_memory[in_memory].get(nbytes, {}),
                chosen_algorithms[in_memory].get(nbytes, ""),
            )
            for in_memory in seconds_by_memory
        ]
        grid.add_row(
            size_text(nbytes),
            *(cell for cells_of_memory in cells for cell in cells_of_memory[: 2 + has_native]),
        )
    return grid


def _choice_cells(seconds: dict[str, float], name: str) -> tuple[str, str, str]:
    if name not in seconds:
        return "-", "-", "-"
    gain = f"{seconds['native'] / seconds[name]:.2f}" if "native" in seconds else "-"
    return name, f"{seconds[name] * 1e6:.4g}", gain


def _buckets_text(table: Table) -> str:
    """Return the chosen bucket size for gradient planes of several sizes."""
    bucket_lengths = [
        (size_text(nbytes), select.best_bucket_bytes(table.buckets, nbytes))
        for nbytes in PLANE_BYTES
    ]
    return ", ".join(
        f"{size_text(nbytes)} of a plane of {plane}" for plane, nbytes in bucket_lengths
    )
