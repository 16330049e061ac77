"""`hpctrain tune`: from options to a tuning table on disk, a printed one and a plot."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hpctrain import config
from hpctrain.bench import memory_check, message_sizes
from hpctrain.bench.collectives import must_draw, rounds_of
from hpctrain.bench.p2p import DEVICES
from hpctrain.bench.tuning import printed_table
from hpctrain.core import progress
from hpctrain.core.errors import UsageError
from hpctrain.transport.device import gpus
from hpctrain.tuning import choose, sweep, table
from hpctrain.tuning.alpha_beta import constants
from hpctrain.tuning.choose import AlgorithmTime
from hpctrain.tuning.table import Table
from hpctrain.world import World

SIZES = "4B:64MiB,6KiB:384KiB"
ROUNDS, LIMIT_S = 60, 40.0  #: as many rounds as fit into the time
NO_LIMIT_S = 1e9
CONSTANT_ROUNDS, BUCKET_ROUNDS = 5, 3
TASK = TaskID(0)  #: of the bar


@dataclass(frozen=True)
class Options:
    """Options of the command line, validated; this needs no MPI."""

    device: gpus.Device
    sizes: list[int]
    rounds: int
    limit_s: float
    out: Path | None
    plot: Path | None


def check(
    sizes_text: str | None,
    rounds: int | None,
    out: Path | None,
    plot: Path | None,
    device: str = "cpu",
) -> Options:
    """Return the validated options; raise UsageError with the expected value.

    An explicit number of rounds has no time limit.
    """
    target = config.pick(DEVICES, device, "--device")
    lengths = message_sizes.parse(SIZES if sizes_text is None else sizes_text)
    if lengths[0] < 1:
        raise UsageError(f"--sizes: {message_sizes.EXPECTED}, seen '{sizes_text}'")
    must_draw(plot)
    if rounds is None:
        return Options(target, lengths, ROUNDS, LIMIT_S, out, plot)
    minimum = sweep.MIN_ROUNDS
    return Options(target, lengths, rounds_of("--rounds", rounds, minimum), NO_LIMIT_S, out, plot)


def run(world: World, options: Options) -> None:
    """Measure, write the table, show and draw it. Collective; rank 0 writes and prints."""
    if world.size == 1:
        raise UsageError("one rank has nothing to tune; start more: hpctrain launch -n RANKS tune")
    group, over_mpi, on_gpu = world.main, world.transport == "mpi", options.device == "gpu"
    if on_gpu:
        memory_check.check_gpu(world, max(options.sizes), sweep.bytes_needed(max(options.sizes)))
    xp = gpus.cupy_module() if on_gpu else np
    fingerprint = table.fingerprint(group, over_mpi, world.gpus if on_gpu else None)
    path = options.out or table.default_file(fingerprint)
    memory_check.check(world, max(options.sizes), rivals=False)
    world.on_all_ranks(lambda: _must_be_writable(world, path, options.plot))
    rows: list[AlgorithmTime] = []
    with _bar(world, 2 * options.rounds + 1) as bar:
        node, across = constants(group, CONSTANT_ROUNDS, xp)
        for rows in sweep.sweep(group, options.sizes, options.rounds, options.limit_s, xp):  # noqa: B007
            bar.update(TASK, advance=1, description="rounds over sizes", refresh=True)
        bar.update(TASK, completed=2 * options.rounds, description="buckets", refresh=True)
        buckets = list(sweep.buckets(group, rows, max(options.sizes), BUCKET_ROUNDS, xp))
        bar.update(TASK, advance=1, refresh=True)
    tuning_table = Table(fingerprint, rows, buckets, node, across, choose.noisy(rows))
    world.on_all_ranks(lambda: _keep(world, tuning_table, path, options.plot))


def show(file: Path | None, ranks: int, plot: Path | None, device: str = "cpu") -> None:
    """Show the table in `file`, else the newest of this machine; this needs no MPI.

    With several `ranks`, the newest for that number; always for the memory of `device`.

    Raises UsageError if there is none.
    """
    must_draw(plot)
    path = file or table.newest_file(ranks, config.pick(DEVICES, device, "--device") == "gpu")
    try:
        tuning_table = table.read(path)
    except table.TableError as error:
        raise UsageError(f"--show {path}: {error}") from None
    printed_table.show(tuning_table, path)
    _draw(tuning_table, plot)


def _must_be_writable(world: World, path: Path, plot: Path | None) -> None:
    if world.rank == 0:
        for file in filter(None, (path, plot)):
            table.must_be_writable(file)


def _keep(world: World, tuning_table: Table, path: Path, plot: Path | None) -> None:
    if world.rank == 0:
        table.write(tuning_table, path)
        printed_table.show(tuning_table, path)
        _draw(tuning_table, plot)
        if tuning_table.noisy:
            print(
                f"hpctrain: tune: {printed_table.noise(tuning_table.noisy)}",
                file=sys.stderr,
                flush=True,
            )


def _draw(tuning_table: Table, plot: Path | None) -> None:
    if plot is not None:
        import_module("hpctrain.bench.tuning.plots").draw(tuning_table, plot)


def _bar(world: World, total: int) -> Progress:
    """Return a progress bar, drawn by rank 0 alone and only on a terminal."""
    console = progress.console()
    bar = Progress(
        TextColumn("tune  {task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal or world.rank > 0,
        auto_refresh=False,  # a thread that draws would take a core from those who are measured
    )
    bar.add_task("alpha, beta, gamma", total=total)
    return bar
