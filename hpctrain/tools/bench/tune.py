"""`hpctrain tune`: from options to a tuning table on disk, its printed form and a plot.

The printed table has the algorithm chosen for each size, and its gain over MPI's own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import rich.table
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hpctrain.core import config, progress, thresholds
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import fit_table, make_table
from hpctrain.core.printing import say
from hpctrain.tools.bench import base, units
from hpctrain.tools.bench.base import (
    check_gpu_memory,
    check_host_memory,
    check_plot_path,
    require_minimum,
)
from hpctrain.tools.bench.p2p import DEVICES
from hpctrain.tools.bench.units import size_text
from hpctrain.transport.device import gpus
from hpctrain.tuning import choose, select, sweep, table
from hpctrain.tuning.alpha_beta import measure_constants
from hpctrain.tuning.choose import AlgorithmTime
from hpctrain.tuning.table import Table
from hpctrain.world import World

DEFAULT_SIZES = "4B:64MiB,6KiB:384KiB"
DEFAULT_ROUNDS, DEFAULT_LIMIT_S = 60, 40.0  #: up to this many rounds within this time
UNLIMITED_S = 1e9
CONSTANT_ROUNDS, BUCKET_ROUNDS = 5, 3
PROGRESS_TASK = TaskID(0)  #: the only task of the progress bar
MEMORY_HEADINGS = {True: "in node memory", False: "plain arrays"}
GPU_MEMORY_HEADINGS = {True: "neighbours see it", False: "plain arrays"}
PLANE_BYTES = [1 << 20, 16 << 20, 256 << 20]
DEFAULT_WIDTH = 110  #: without a terminal


@dataclass(frozen=True)
class Options:
    """Validated options of the command line; validation needs no MPI."""

    device: gpus.Device
    sizes: list[int]
    rounds: int
    limit_s: float
    out: Path | None
    plot: Path | None
    keep_noisy: bool = False  #: write a table of a busy machine also to the cache


def parse_options(
    sizes_text: str | None,
    rounds: int | None,
    out: Path | None,
    plot: Path | None,
    device: str = "cpu",
    keep_noisy: bool = False,
) -> Options:
    """Return the validated options; a UsageError names the expected value.

    An explicit number of rounds has no time limit.
    """
    device_kind = config.pick(DEVICES, device, "--device")
    lengths = units.parse_sizes(DEFAULT_SIZES if sizes_text is None else sizes_text)
    if lengths[0] < 1:
        raise UsageError(f"--sizes: {units.EXPECTED_SIZES}, seen '{sizes_text}'")
    check_plot_path(plot)
    if rounds is None:
        limits = DEFAULT_ROUNDS, DEFAULT_LIMIT_S
    else:
        require_minimum("--rounds", rounds, sweep.MIN_ROUNDS)
        limits = rounds, UNLIMITED_S
    return Options(device_kind, lengths, *limits, out, plot, keep_noisy)


def run(world: World, options: Options) -> bool:
    """Measure; write, print and draw the table from rank 0; return whether it was written.

    A table of a busy machine is written only to the file that the user named, or if the user asked
    for it: `auto` would use its chance choices. Collective.
    """
    if world.size == 1:
        raise UsageError("one rank has nothing to tune; start more: hpctrain launch -n RANKS tune")
    group, is_over_mpi, is_on_gpu = world.main, world.transport == "mpi", options.device == "gpu"
    if is_on_gpu:
        check_gpu_memory(world, max(options.sizes), sweep.bytes_needed(max(options.sizes)))
    array_module = gpus.import_cupy() if is_on_gpu else np
    fingerprint = table.make_fingerprint(group, is_over_mpi, world.gpus if is_on_gpu else None)
    path = options.out or table.default_file(fingerprint)
    check_host_memory(world, max(options.sizes), with_rivals=False)
    base.check_writable(world, path, options.plot)
    rows: list[AlgorithmTime] = []
    with _make_progress_bar(world, 2 * options.rounds + 1) as progress_bar:
        in_node, between_nodes = measure_constants(group, CONSTANT_ROUNDS, array_module)
        rounds = sweep.sweep(group, options.sizes, options.rounds, options.limit_s, array_module)
        for rows in rounds:  # noqa: B007
            progress_bar.update(
                PROGRESS_TASK, advance=1, description="rounds over sizes", refresh=True
            )
        progress_bar.update(
            PROGRESS_TASK, completed=2 * options.rounds, description="buckets", refresh=True
        )
        buckets = list(
            sweep.measure_buckets(group, rows, max(options.sizes), BUCKET_ROUNDS, array_module)
        )
        progress_bar.update(PROGRESS_TASK, advance=1, refresh=True)
    tuning_table = Table(
        fingerprint, rows, buckets, in_node, between_nodes, choose.find_noise(rows)
    )
    is_asked_for = options.out is not None or options.keep_noisy
    is_kept = world.from_first(lambda: tuning_table.noisy is None or is_asked_for)
    world.on_all_ranks(lambda: _save_and_show(world, tuning_table, path, options.plot, is_kept))
    return is_kept


def show_table(file: Path | None, ranks: int, plot: Path | None, device: str = "cpu") -> None:
    """Print the table in `file`, by default the newest one of this machine; needs no MPI.

    Several `ranks` select the newest table for that number, and `device` the kind of memory.

    Raises UsageError if there is none.
    """
    check_plot_path(plot)
    path = file or table.newest_file(ranks, config.pick(DEVICES, device, "--device") == "gpu")
    try:
        tuning_table = table.read_table(path)
    except table.TableError as error:
        raise UsageError(f"--show {path}: {error}") from None
    print_table(tuning_table, path)
    _draw_plot(tuning_table, plot)


def _save_and_show(
    world: World, tuning_table: Table, path: Path, plot: Path | None, is_kept: bool
) -> None:
    if world.rank > 0:
        return
    if is_kept:
        table.write_table(tuning_table, path)
    print_table(tuning_table, path if is_kept else None)
    _draw_plot(tuning_table, plot)
    if not is_kept:
        sys.stdout.flush()  # the table first, where both go to one file
        message = f"too noisy: nothing was written to {path}; --keep-noisy writes it"
        say(f"hpctrain: tune: {message}", err=True)


def _draw_plot(tuning_table: Table, plot: Path | None) -> None:
    if plot is not None:
        import_module("hpctrain.tools.bench.plot").draw_table(tuning_table, plot)
        base.report_file(plot)


def _make_progress_bar(world: World, step_count: int) -> Progress:
    """Return a progress bar, which only rank 0 draws, and only on a terminal."""
    console = progress.console()
    progress_bar = Progress(
        TextColumn("tune  {task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal or world.rank > 0,
        auto_refresh=False,  # a drawing thread would take a core from a rank
    )
    progress_bar.add_task("alpha, beta, gamma", total=step_count)
    return progress_bar


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
    memory_headings = [
        f"{memory_heading(table, in_memory)}: takes" for in_memory in seconds_by_memory
    ]
    time_headings = ["us", *["x native"] * has_native]
    chosen_algorithms = {
        in_memory: thresholds.choices_at(seconds_by_size)
        for in_memory, seconds_by_size in seconds_by_memory.items()
    }
    rows = (
        [
            size_text(nbytes),
            *(
                cell
                for in_memory, seconds_by_size in seconds_by_memory.items()
                for cell in _choice_cells(
                    seconds_by_size.get(nbytes, {}), chosen_algorithms[in_memory].get(nbytes, "")
                )[: 2 + has_native]
            ),
        ]
        for nbytes in sorted({row.bytes for row in table.rows})
    )
    return make_table(
        ["size", *(text for name in memory_headings for text in (name, *time_headings))],
        rows,
        *memory_headings,
    )


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
