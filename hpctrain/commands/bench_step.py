"""`hpctrain bench step`."""

from __future__ import annotations

from typing import Any

import click

from hpctrain import world
from hpctrain.commands import _options
from hpctrain.commands._options import complete_recipes

STEP_EPILOG = """\b
Examples:
  mpirun -n 2 hpctrain bench step digits --batch-per-rank 64
  mpirun -n 2 hpctrain bench step benchmarks/mlp-10m.toml --batch-per-rank 32,128 \\
      --algorithms auto,direct,share-parameters --rivals gloo,horovod --json training_step.json
  mpirun -n 2 hpctrain bench step benchmarks/mlp-10m.toml --batch-per-rank 32 --model torch

`share-parameters` keeps one array of parameters per node; all other names are algorithms of [wire].
Steps without communication are always timed too. Rivals are PyTorch with DistributedDataParallel
on Gloo (gloo) and on our backend (ddp), with ht.torch.sync (sync) and with Horovod's
DistributedOptimizer (horovod); they train a dense model by SGD. The schedule of the recipe is
ignored: all steps use its constant rate. --model torch takes the rivals gloo, ddp and sync.
"""


@click.command(epilog=STEP_EPILOG)
@click.argument("name", metavar="RECIPE", shell_complete=complete_recipes)
@click.option("--algorithms", default="auto,share-parameters", show_default=True, metavar="NAMES",
              help="Algorithms of hpctrain.")  # fmt: skip
@click.option("--rivals", default="", metavar="NAMES", help="Others: horovod, gloo, ddp, sync.")
@click.option("--model", default="ours", show_default=True, metavar="ours|torch",
              help="What our engines train: our layers, or the same model in PyTorch.")  # fmt: skip
@click.option(
    "--batch-per-rank", "batches", metavar="N,...", help="Samples per rank; default: as in RECIPE."
)
@_options.set_option
@_options.iterations_option
@_options.warm_up_option(2)
@_options.json_option
@_options.plot_option
def step(name: str, rivals: str, **option_values: Any) -> None:
    """Time whole training steps of RECIPE's model, beside other libraries."""
    from hpctrain.tools.bench import training_step  # late: it imports the trainer

    options = training_step.parse_options(name, rivals_text=rivals, **option_values)
    training_step.run(world.init("cpu"), options)
