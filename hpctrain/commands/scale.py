"""`hpctrain scale`: measures the scaling of a recipe, from one command to a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain.commands import _options
from hpctrain.tools.scaling.trial_recipe import SCALING_MODES
from hpctrain.tools.scaling.trials.local_runner import PLACES

EPILOG = """\b
Examples:
  hpctrain scale digits --ranks 1,2 --mode strong --out studies/digits
  hpctrain scale my.toml --ranks 1:64 --mode weak --set engine.kind=allreduce
  hpctrain scale --ranks 1,2 --samples-per-step 256 -- python ddp.py --batch-size {batch}
  hpctrain scale mnist --nodes 1,2,4 --on netlab --link 1gbit
  hpctrain scale my.toml --nodes 1,2,4,8 --ranks-per-node 4 --on slurm --out studies/mine

Strong scaling shares the recipe's batch among all ranks; weak scaling gives the whole batch to each
rank. {batch} in the arguments of a script stands for the batch of a rank. While trials run, a table
shows the state of each size; a log gets a line per change. The same command on the same folder
continues an interrupted study, finds the jobs it has submitted to Slurm, and may add sizes and
repeats. While another process runs the study, it shows the progress. Exit codes: 0 all sizes
measured; 1 measurements are missing, as the table shows; 2 refused before the first trial; 130
interrupted. See docs/scaling.md.
"""


@click.command(cls=_options.ProgramCommand, epilog=EPILOG)
@_options.recipe_argument
@click.option("--ranks", metavar="N,...", help="Numbers of ranks: 1,2,4; 1:64 doubles.")
@click.option("--nodes", metavar="N,...", help="Numbers of nodes, or of hosts of a netlab.")
@click.option("--ranks-per-node", type=int, metavar="R", help="Ranks per node; default: 1.")
@click.option(
    "--mode",
    type=click.Choice(SCALING_MODES),
    default="strong",
    show_default=True,
    help="One batch for all ranks (strong), or one per rank (weak).",
)
@click.option(
    "--on", type=click.Choice(PLACES), default="local", show_default=True, help="Where trials run."
)
@click.option("--link", metavar="SPEED", help="Rate of a netlab's links; default: 1gbit.")
@click.option("--site", metavar="NAME", help="Slurm: as for `hpctrain slurm render`.")
@click.option("--time", metavar="TIME", help="Slurm: time limit of each job; default: 0:30:00.")
@click.option("--gpus-per-node", type=int, metavar="N", help="Slurm: GPUs per node, one rank each.")
@click.option("--cpus-per-task", type=int, metavar="N", help="Slurm: cores per rank.")
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="Slurm: an option of sbatch."
)
@click.option(
    "--repeats", type=int, default=3, show_default=True, metavar="N", help="Trials per size."
)
@click.option(
    "--steps",
    type=int,
    metavar="N",
    help="Timed steps per trial; default: about 2 s, on Slurm 200 steps.",
)
@click.option(
    "--samples-per-step",
    type=int,
    metavar="N",
    help="Of a PROGRAM: samples of a step, or of a rank (weak); default: from its DataLoader.",
)
@_options.single_set_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Default: runs/scale-RECIPE-MODE-TIME.",
)
@click.pass_context
def scale(context: click.Context, /, **option_values: Any) -> None:
    """Measure how RECIPE, or a script of PyTorch, scales over numbers of ranks.

    The trials make a table, fits, plots and a report.
    """
    from hpctrain.tools.scaling import command  # late, so that `--help` stays fast

    context.exit(command.scale(option_values))
