"""`hpctrain tune`: from options to a tuning table on disk, its printed form and a plot."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hpctrain.core import config, progress
from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.tools.bench import memory_check, message_sizes, output
from hpctrain.tools.bench.options import check_plot_path, require_minimum
from hpctrain.tools.bench.p2p import DEVICES
from hpctrain.tools.bench.tuning import printed_table
from hpctrain.transport.device import gpus
from hpctrain.tuning import choose, sweep, table
from hpctrain.tuning.alpha_beta import measure_constants
from hpctrain.tuning.choose import AlgorithmTime
from hpctrain.tuning.table import Table
from hpctrain.world import World

DEFAULT_SIZES = "4B:64MiB,6KiB:384KiB"
DEFAULT_ROUNDS, DEFAULT_LIMIT_S = 60, 40.0  #: up to this many rounds within this time
UNLIMITED_S = 1e9
CONSTANT_ROUNDS, BUCKET_ROUNDS = 5, 3
PROGRESS_TASK = TaskID(0)  #: the only task of the progress bar


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
    lengths = message_sizes.parse(DEFAULT_SIZES if sizes_text is None else sizes_text)
    if lengths[0] < 1:
        raise UsageError(f"--sizes: {message_sizes.EXPECTED_SIZES}, seen '{sizes_text}'")
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
        memory_check.check_gpu_memory(
            world, max(options.sizes), sweep.bytes_needed(max(options.sizes))
        )
    array_module = gpus.import_cupy() if is_on_gpu else np
    fingerprint = table.make_fingerprint(group, is_over_mpi, world.gpus if is_on_gpu else None)
    path = options.out or table.default_file(fingerprint)
    memory_check.check_host_memory(world, max(options.sizes), with_rivals=False)
    world.on_all_ranks(lambda: _check_writable(world, path, options.plot))
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
    is_kept = tuning_table.noisy is None or options.out is not None or options.keep_noisy
    is_kept = world.gather(str(is_kept))[0] == "True"
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
    printed_table.print_table(tuning_table, path)
    _draw_plot(tuning_table, plot)


def _check_writable(world: World, path: Path, plot: Path | None) -> None:
    if world.rank == 0:
        for file in filter(None, (path, plot)):
            table.check_writable(file)


def _save_and_show(
    world: World, tuning_table: Table, path: Path, plot: Path | None, is_kept: bool
) -> None:
    if world.rank > 0:
        return
    if is_kept:
        table.write_table(tuning_table, path)
    printed_table.print_table(tuning_table, path if is_kept else None)
    _draw_plot(tuning_table, plot)
    if not is_kept:
        sys.stdout.flush()  # the table first, where both go to one file
        message = f"too noisy: nothing was written to {path}; --keep-noisy writes it"
        say(f"hpctrain: tune: {message}", err=True)


def _draw_plot(tuning_table: Table, plot: Path | None) -> None:
    if plot is not None:
        import_module("hpctrain.tools.bench.tuning.plots").draw_table(tuning_table, plot)
        output.report_file(plot)


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
