"""`hpctrain tune`: from what was typed to a tuning table on disk, shown and drawn."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hpctrain import config, progress
from hpctrain.bench import room, sizes, tuned
from hpctrain.bench.collectives import must_draw, rounds_of
from hpctrain.bench.p2p import DEVICES
from hpctrain.errors import UsageError
from hpctrain.transport import gpus
from hpctrain.tuning import choose, sweep, table
from hpctrain.tuning.choose import Row
from hpctrain.tuning.constants import constants
from hpctrain.tuning.table import Table
from hpctrain.world import World

SIZES = "4B:64MiB,6KiB:384KiB"
ROUNDS, LIMIT_S = 60, 40.0  #: as many rounds as fit into the time
NO_LIMIT_S = 1e9
CONSTANT_ROUNDS, BUCKET_ROUNDS = 5, 3
TASK = TaskID(0)  #: of the bar


@dataclass(frozen=True)
class Asked:
    """What the command line asked for, checked; MPI is not needed for that."""

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
) -> Asked:
    """Return what was asked for; raise UsageError that names what was expected.

    Who asks for so many rounds gets them, however long they take.
    """
    where = config.pick(DEVICES, device, "--device")
    asked = sizes.parse(SIZES if sizes_text is None else sizes_text)
    if asked[0] < 1:
        raise UsageError(f"--sizes: {sizes.EXPECTED}, seen '{sizes_text}'")
    must_draw(plot)
    if rounds is None:
        return Asked(where, asked, ROUNDS, LIMIT_S, out, plot)
    least = sweep.LEAST_ROUNDS
    return Asked(where, asked, rounds_of("--rounds", rounds, least), NO_LIMIT_S, out, plot)


def run(world: World, asked: Asked) -> None:
    """Measure, write the table, show and draw it. Collective; rank 0 touches files and speaks."""
    if world.size == 1:
        raise UsageError("one rank has nothing to tune; start more: hpctrain launch -n RANKS tune")
    group, over_mpi, on_gpu = world.main, world.transport == "mpi", asked.device == "gpu"
    if on_gpu:
        room.check_gpu(world, max(asked.sizes), sweep.bytes_needed(max(asked.sizes)))
    xp = gpus.cupy_module() if on_gpu else np
    here = table.fingerprint(group, over_mpi, world.gpus if on_gpu else None)
    path = asked.out or table.place(here)
    room.check(world, max(asked.sizes), rivals=False)
    world.together(lambda: _must_be_writable(world, path, asked.plot))
    found: list[Row] = []
    with _bar(world, 2 * asked.rounds + 1) as bar:
        node, across = constants(group, CONSTANT_ROUNDS, xp)
        for found in sweep.sweep(group, asked.sizes, asked.rounds, asked.limit_s, xp):  # noqa: B007
            bar.update(TASK, advance=1, description="rounds over sizes", refresh=True)
        bar.update(TASK, completed=2 * asked.rounds, description="buckets", refresh=True)
        buckets = list(sweep.buckets(group, found, max(asked.sizes), BUCKET_ROUNDS, xp))
        bar.update(TASK, advance=1, refresh=True)
    made = Table(here, found, buckets, node, across, choose.noisy(found))
    world.together(lambda: _keep(world, made, path, asked.plot))


def show(file: Path | None, ranks: int, plot: Path | None, device: str = "cpu") -> None:
    """Show the table in `file`, else the newest of this machine; MPI is not needed for that.

    Where there are several `ranks`, the newest of so many; of the memory of `device`.

    Raises UsageError where there is none.
    """
    must_draw(plot)
    path = file or table.newest(ranks, config.pick(DEVICES, device, "--device") == "gpu")
    try:
        found = table.read(path)
    except table.Unfit as error:
        raise UsageError(f"--show {path}: {error}") from None
    tuned.show(found, path)
    _draw(found, plot)


def _must_be_writable(world: World, path: Path, plot: Path | None) -> None:
    if world.rank == 0:
        for one in filter(None, (path, plot)):
            table.must_be_writable(one)


def _keep(world: World, found: Table, path: Path, plot: Path | None) -> None:
    if world.rank == 0:
        table.write(found, path)
        tuned.show(found, path)
        _draw(found, plot)
        if found.noisy:
            print(f"hpctrain: tune: {tuned.noise(found.noisy)}", file=sys.stderr, flush=True)


def _draw(found: Table, plot: Path | None) -> None:
    if plot is not None:
        import_module("hpctrain.bench.tuned_plot").draw(found, plot)


def _bar(world: World, total: int) -> Progress:
    """Return a bar that only rank 0 draws, and only on a terminal."""
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
