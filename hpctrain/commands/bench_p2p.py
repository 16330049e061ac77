"""`hpctrain bench p2p`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain import world
from hpctrain.bench import p2p as bench

EPILOG = """\b
Examples:
  mpirun -n 2 hpctrain bench p2p
  srun -N 2 -n 2 hpctrain bench p2p --sizes 1B:64MiB --json link.json --plot link.png
  srun -N 2 -n 2 --gpus-per-node=1 hpctrain bench p2p --device gpu
  mpirun -n 8 hpctrain bench p2p --ranks 0,7 --sizes 64KiB,1MiB
"""
FILE_TYPE = click.Path(path_type=Path, dir_okay=False)


@click.command(epilog=EPILOG)
@click.option("--sizes", default="1B:64MiB", show_default=True, metavar="SIZES",
              help="A:B doubles, A:B*4 quadruples; or a list.")  # fmt: skip
@click.option(
    "--ranks", metavar="A,B", help="The two ranks; default: 0 and a rank of another node."
)
@click.option("--iterations", default=20, show_default=True, metavar="N", help="Timed rounds.")
@click.option(
    "--warm-up", default=3, show_default=True, metavar="N", help="Untimed rounds before these."
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|gpu",
    help="Memory of the messages; gpu times each available path.",
)
@click.option(
    "--json", type=FILE_TYPE, metavar="FILE", help="Write all rows and facts of the machine."
)
@click.option("--plot", type=FILE_TYPE, metavar="FILE", help="Plot the rows: .png or .svg.")
def p2p(sizes: str, **option_values: Any) -> None:
    """Time messages between two ranks: latency by ping-pong, bandwidth one way."""
    options = bench.parse_options(sizes, **option_values)
    bench.run(world.init(options.device), options)
