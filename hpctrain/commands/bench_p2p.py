"""`hpctrain bench p2p`."""

from __future__ import annotations

from typing import Any

import click

from hpctrain import world
from hpctrain.commands import _options

P2P_EPILOG = """\b
Examples:
  mpirun -n 2 hpctrain bench p2p
  srun -N 2 -n 2 hpctrain bench p2p --sizes 1B:64MiB --json link.json --plot link.png
  srun -N 2 -n 2 --gpus-per-node=1 hpctrain bench p2p --device gpu
  mpirun -n 8 hpctrain bench p2p --ranks 0,7 --sizes 64KiB,1MiB
"""


@click.command(epilog=P2P_EPILOG)
@click.option("--sizes", default="1B:64MiB", show_default=True, metavar="SIZES",
              help="A:B doubles, A:B*4 quadruples; or a list.")  # fmt: skip
@click.option(
    "--ranks", metavar="A,B", help="The two ranks; default: 0 and a rank on another node."
)
@_options.iterations_option
@_options.warm_up_option(3)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|gpu",
    help="Memory of the messages; gpu times each available path.",
)
@_options.json_option
@_options.plot_option
def p2p(sizes: str, **option_values: Any) -> None:
    """Time messages between two ranks: latency by ping-pong, bandwidth one way."""
    from hpctrain.tools.bench import p2p as bench

    options = bench.parse_options(sizes, **option_values)
    bench.run(world.init(options.device), options)
