"""`hpctrain bench step`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain import world
from hpctrain.bench.training_step import command
from hpctrain.commands import _options
from hpctrain.commands._complete import recipes

EPILOG = """\b
Examples:
  mpirun -n 2 hpctrain bench step digits --batch-per-rank 64
  mpirun -n 2 hpctrain bench step benchmarks/mlp-10m.toml --batch-per-rank 32,128 \\
      --algorithms auto,direct,share-parameters --rivals gloo,horovod --json step.json

`share-parameters` is one array of parameters per node; any other algorithm is that of [wire].
Steps without communication are always among them. Rivals are PyTorch with DistributedDataParallel
on Gloo and with Horovod's DistributedOptimizer; they train a dense model by SGD. The schedule of
the recipe is left out: all train at its rate.
"""
FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(epilog=EPILOG)
@click.argument("name", metavar="RECIPE", shell_complete=recipes)
@click.option("--algorithms", default="auto,share-parameters", show_default=True, metavar="NAMES",
              help="Algorithms of hpctrain.")  # fmt: skip
@click.option("--rivals", default="", metavar="NAMES", help="Other libraries: horovod, gloo.")
@click.option("--batch-per-rank", "batches", metavar="N,...", help="Default: the recipe's.")
@_options.sets
@click.option("--iterations", default=20, show_default=True, metavar="N", help="Timed rounds.")
@click.option("--warm-up", default=2, show_default=True, metavar="N", help="Rounds before.")
@click.option("--json", type=FILE, metavar="FILE", help="Write all rows, with the machine.")
@click.option("--plot", type=FILE, metavar="FILE", help="Draw them: .png or .svg.")
def step(name: str, rivals: str, **flags: Any) -> None:
    """Time whole training steps of RECIPE's model, beside other libraries."""
    options = command.parse_options(name, rivals_text=rivals, **flags)
    command.run(world.init("cpu"), options)
