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
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(epilog=EPILOG)
@click.option("--sizes", default="1B:64MiB", show_default=True, metavar="SIZES",
              help="A doubling range, with *4 a quadrupling one, or a list.")  # fmt: skip
@click.option("--ranks", metavar="A,B", help="The two ranks; by default 0 and one on another node.")
@click.option("--iterations", default=20, show_default=True, metavar="N", help="Timed rounds.")
@click.option("--warm-up", default=3, show_default=True, metavar="N", help="Rounds before.")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|gpu",
    help="The memory of messages; with gpu each available path is timed.",
)
@click.option("--json", type=FILE, metavar="FILE", help="Write all rows, with the machine.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw them: .png or .svg.")
def p2p(sizes: str, **flags: Any) -> None:
    """Time messages between two ranks: latency by ping-pong, bandwidth one way."""
    options = bench.parse_options(sizes, **flags)
    bench.run(world.init(options.device), options)
