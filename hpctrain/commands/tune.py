"""`hpctrain tune`: measures the fastest all-reduce on this machine, for `auto`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpctrain import world
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import tune as tuning

FILE_TYPE = click.Path(path_type=Path)
EPILOG = """\b
Examples:
  mpirun -n 4 hpctrain tune
  mpirun -n 4 hpctrain tune --device gpu
  mpirun -n 4 hpctrain tune --sizes 1KiB:16MiB --rounds 30 --plot tuning.png
  hpctrain tune --show
  hpctrain tune --show --device gpu

The table lies in $XDG_CACHE_HOME/hpctrain/tuning, by default ~/.cache/hpctrain/tuning; the
environment variable HPCTRAIN_TUNING names another folder, or one file. `auto` uses it wherever
machine, MPI and layout of the ranks are the same: see docs/tuning.md. Arrays on GPUs have a table
of their own, for these GPUs and this GPU path.

On fewer cores than ranks Open MPI needs `mpirun --oversubscribe`; `hpctrain launch` adds it.
"""


@click.command(epilog=EPILOG)
@click.option(
    "--sizes",
    metavar="SIZES",
    help=f"Default: {tuning.DEFAULT_SIZES}; also the size midway where the fastest changes.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|gpu",
    help="The memory of the arrays.",
)
@click.option(
    "--rounds", type=int, metavar="N", help="Rounds; default: as many as fit into a minute."
)
@click.option(
    "--out", type=FILE_TYPE, metavar="FILE", help="Write the table to FILE instead of the cache."
)
@click.option(
    "--show",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Measure nothing: show the table in FILE, or the newest of this machine.",
)
@click.option(
    "--keep-noisy",
    is_flag=True,
    help="Keep the table also if the machine was too busy to conclude.",
)
@click.option("--plot", type=FILE_TYPE, metavar="FILE", help="Plot the table: .png or .svg.")
@click.pass_context
def tune(
    context: click.Context,
    /,
    sizes: str | None,
    device: str,
    rounds: int | None,
    out: Path | None,
    show: str | None,
    keep_noisy: bool,
    plot: Path | None,
) -> None:
    """Measure which all-reduce is fastest here; `auto` then uses it.

    If the machine was too busy to conclude, no table is kept, unless --out or --keep-noisy asks for
    it, and the exit code is 1.
    """
    if show is None:
        options = tuning.parse_options(sizes, rounds, out, plot, device, keep_noisy)
        context.exit(0 if tuning.run(world.init(options.device), options) else 1)
    elif (sizes, rounds, out, keep_noisy) != (None, None, None, False):
        raise UsageError(
            "--show measures nothing: leave out --sizes, --rounds, --out and --keep-noisy"
        )
    elif (launched := launchers.launched(os.environ)).rank == 0:
        tuning.show_table(Path(show) if show else None, launched.size, plot, device)
