"""`hpctrain chaos`: training jobs under planted faults, and the promises that must hold."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.commands._options import FILE_TYPE

EPILOG = """\b
Examples:
  hpctrain chaos faults.toml                          all cases; results in faults-results.jsonl
  hpctrain chaos faults.toml --list                   the cases, with their verdicts so far
  hpctrain chaos faults.toml --resume                 go on with cases that have not passed
  hpctrain chaos faults.toml --case 17 --keep         one case again; its folder stays
  hpctrain chaos faults-results.jsonl --failed        the cases of a file of results that failed

\b
A campaign:
  schema = 1
  seed = 15
  cases = 200
  recipes = ["my.toml"]            # or engines = ["allreduce", "ps-sync"], small built-in recipes
  ranks = [2, 3, 4]
  spares = [0, 1]                  # with the launchers elastic and threads
  launchers = ["elastic"]          # launch, mpiexec, threads, netlab, srun
  [faults]
  count = [1, 2]
  kinds = ["kill-rank", "stop-rank", "kill-launcher", "failing-file"]
  moments = ["step", "checkpoint"]

A case is a function of the campaign, its seed and its number. Each job suffers its faults and is
resumed until it has completed; then files, processes and parameters are compared with a run without
faults. Exit codes: 0 all promises hold; 1 one is broken; 2 wrong campaign. Where Linux namespaces
are not permitted, cases run without, and the summary lists what is not checked. See
docs/reliability.md.
"""


@click.command(epilog=EPILOG)
@click.argument("campaign", type=FILE_TYPE, metavar="CAMPAIGN.toml")
@click.option("--case", "indexes", type=int, multiple=True, metavar="N", help="Run case N alone.")
@click.option("--seed", type=int, metavar="N", help="Another seed than the campaign's.")
@click.option("--cases", type=click.IntRange(1), metavar="N", help="Another number of cases.")
@click.option("--list", "lists", is_flag=True, help="List the cases and verdicts; run no job.")
@click.option("--resume", is_flag=True, help="Run the cases that have not passed in the results.")
@click.option("--failed", is_flag=True, help="Of a file of results: the cases that failed.")
@click.option(
    "--results",
    type=FILE_TYPE,
    metavar="FILE",
    help="Lines of JSON; default: CAMPAIGN-results.jsonl.",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of the jobs, on several nodes a shared one; default: a temporary one.",
)
@click.option("--keep", is_flag=True, help="Keep the folders of cases that passed, too.")
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Cases at a time.",
)
@click.option("--no-namespaces", is_flag=True, help="Run as where namespaces are not permitted.")
@click.pass_context
def chaos(context: click.Context, /, no_namespaces: bool, **values: object) -> None:
    """Train under planted faults, and check what hpctrain promises."""
    from hpctrain.tools.chaos import command  # late, so that `--help` stays fast

    request = command.Request(isolate=not no_namespaces, **values)  # type: ignore[arg-type]
    context.exit(command.chaos(request))
