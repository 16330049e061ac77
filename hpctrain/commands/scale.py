"""`hpctrain scale`: measures the scaling of a recipe, from one command to a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hpctrain.commands import _options
from hpctrain.commands._complete import recipes
from hpctrain.scaling.trial_recipe import SCALING_MODES
from hpctrain.scaling.trials.local_runner import PLACES

EPILOG = """\b
Examples:
  hpctrain scale digits --ranks 1,2 --mode strong --out studies/digits
  hpctrain scale my.toml --ranks 1:64 --mode weak --set engine.kind=allreduce
  hpctrain scale mnist --nodes 1,2,4 --on netlab --link 1gbit
  hpctrain scale my.toml --nodes 1,2,4,8 --ranks-per-node 4 --on slurm --out studies/mine

Strong scaling shares the recipe's batch among all ranks; weak scaling gives as much to each. While
trials run, a table shows the state of each size; a log gets a line per change. The same command on
the same folder goes on where it was stopped, finds the jobs it has submitted to Slurm, and may add
sizes and repeats; while another process works there it shows the progress. Exit codes: 0 all sizes
measured; 1 something is missing, which the table names; 2 refused before anything ran; 130
interrupted. See docs/scaling.md.
"""


@click.command(epilog=EPILOG)
@click.argument("recipe", metavar="RECIPE", shell_complete=recipes)
@click.option("--ranks", metavar="N,...", help="Ranks in all: 1,2,4; 1:64 doubles.")
@click.option("--nodes", metavar="N,...", help="Nodes, or hosts of a netlab.")
@click.option("--ranks-per-node", type=int, metavar="R", help="On each node; 1 unless given.")
@click.option(
    "--mode",
    type=click.Choice(SCALING_MODES),
    default="strong",
    show_default=True,
    help="One batch for all ranks (strong), or the same for each rank (weak).",
)
@click.option(
    "--on", type=click.Choice(PLACES), default="local", show_default=True, help="Where trials run."
)
@click.option("--link", metavar="SPEED", help="Of a netlab's links; 1gbit unless given.")
@click.option("--site", metavar="NAME", help="Of Slurm: as for `hpctrain slurm render`.")
@click.option("--time", metavar="TIME", help="Of each job of Slurm; 0:30:00 unless given.")
@click.option("--gpus-per-node", type=int, metavar="N", help="Of Slurm's nodes; a rank per GPU.")
@click.option("--cpus-per-task", type=int, metavar="N", help="Of Slurm's: cores of a rank.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Of sbatch.")
@click.option(
    "--repeats", type=int, default=3, show_default=True, metavar="N", help="Trials per size."
)
@click.option(
    "--steps", type=int, metavar="N", help="Timed per trial; some 2 s unless given, 200 on Slurm."
)
@_options.sets
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Default: runs/scale-RECIPE-MODE-TIME.",
)
@click.pass_context
def scale(context: click.Context, /, **words: Any) -> None:
    """Measure how RECIPE scales: a table, fits, plots and a report, from trials on many sizes."""
    from hpctrain.scaling import command  # `--help` stays quick

    context.exit(command.scale(words))
