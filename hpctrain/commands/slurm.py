"""`hpctrain slurm | pbs | flux`: one body that renders, submits, reports on and cancels jobs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from hpctrain import engines
from hpctrain.cluster.jobs import jobs, sweeps
from hpctrain.cluster.jobs.job_status import is_done
from hpctrain.cluster.jobs.request import JobRequest, must_have_one_subject
from hpctrain.cluster.jobs.status_table import print_table
from hpctrain.cluster.schedulers.scheduler import SCHEDULERS, Scheduler
from hpctrain.cluster.slurm.queries import NO_ANSWER
from hpctrain.cluster.slurm.sbatch import parse_option
from hpctrain.cluster.slurm.site import profile_names as site_names
from hpctrain.commands import _options
from hpctrain.commands._groups import CommandParts, make_group
from hpctrain.commands._options import complete_choices
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json

EPILOG = """\b
Examples:
  hpctrain slurm render digits --nodes 4 --site perlmutter --gpus-per-node 4 --time 2:00:00
  hpctrain slurm submit my.toml --nodes 4 --ranks 16 --option account=m1234 --set run.epochs=90
  hpctrain slurm submit digits --nodes 4 --servers 2
  hpctrain slurm submit --nodes 2 --tasks-per-node 4 -- python train.py --epochs 90
  hpctrain slurm status --wait 3600 runs/digits-20260101-120000
  hpctrain slurm log --follow runs/digits-20260101-120000
  hpctrain slurm cancel runs/digits-20260101-120000

Before its time limit a job is stopped and requeued, and it continues at the step where it stopped.
The output of `render` is a script for `sbatch`. PROGRAM gets SIGUSR1 when it is to stop, and may
save and exit with 75. It then starts again with the same arguments, as where SIGUSR1 ends it.
"""


#: The argument and the options that describe a job.
_JOB_OPTIONS = (
    _options.recipe_argument,
    click.option(
        "--nodes",
        type=int,
        metavar="N",
        help="Number of nodes; default: 1, or the largest of --sizes.",
    ),
    click.option("--ranks", type=int, metavar="N", help="Number of ranks on all nodes together."),
    click.option(
        "--tasks-per-node", type=int, metavar="N", help="Ranks per node; default: one per GPU."
    ),
    click.option(
        "--gpus-per-node", type=int, default=0, metavar="N", help="GPUs per node; default: none."
    ),
    click.option("--cpus-per-task", type=int, metavar="N", help="Cores per rank."),
    click.option(
        "--time",
        default="1:00:00",
        metavar="TIME",
        help="Time limit: minutes, H:M:S, D-H or D-H:M:S; default: 1:00:00.",
    ),
    click.option(
        "--site", metavar="NAME", help=f"A profile: {', '.join(site_names())}, or a .toml file."
    ),
    click.option(
        "--servers", type=int, default=0, metavar="N", help="Additional ranks that are servers."
    ),
    click.option(
        "--server-nodes", type=int, default=0, metavar="N", help="Nodes only for servers."
    ),
    click.option(
        "--sizes", metavar="N,N,...", help="Submit a job array over these numbers of nodes."
    ),
    click.option(
        "--engine",
        metavar="KIND",
        shell_complete=complete_choices(engines.ENGINES),
        help=f"One of: {', '.join(engines.ENGINES)}.",
    ),
    click.option("--epochs", type=int, metavar="N", help="Passes over the training data."),
    _options.set_option,
    click.option(
        "--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of sbatch."
    ),
    click.option("--job-name", metavar="NAME", help="Default: the name of the recipe."),
    click.option(
        "--warn-s",
        type=int,
        default=120,
        metavar="S",
        help="Seconds from the stop signal to the time limit; default: 120.",
    ),
    click.option(
        "--max-restarts", type=int, default=20, metavar="N", help="Requeues at most; default: 20."
    ),
    click.option(
        "--relaunches",
        type=int,
        default=3,
        metavar="N",
        help="Restarts in one allocation after lost ranks, before a requeue; default: 3.",
    ),
    click.option(
        "--min-ranks",
        type=int,
        metavar="M",
        help="After a lost node go on with M ranks or more; default: requeue.",
    ),
    click.option(
        "--elastic", is_flag=True, help="Go on with the survivors of a lost rank (Open MPI 5)."
    ),
    click.option(
        "--spares",
        type=int,
        default=0,
        metavar="K",
        help="Of the ranks, K that wait to replace lost ones.",
    ),
    click.option("--out", metavar="DIR", help="The run's folder."),
)


RENDER_EPILOG = """\b
Examples:
  hpctrain slurm render digits --nodes 2 --tasks-per-node 4 --option account=m1234
  hpctrain slurm render my.toml --nodes 4 --gpus-per-node 4 --site leonardo > job.sbatch
  hpctrain slurm render digits --nodes 4 --relaunches 5 --min-ranks 3
  hpctrain slurm render digits --nodes 4 --tasks-per-node 4 --elastic --spares 2
  hpctrain slurm render digits --tasks-per-node 4 --interactive > try.sh
"""


_INTERACTIVE = click.option("--interactive", is_flag=True, help="Print a script that calls salloc.")


def render(scheduler: Scheduler, context: click.Context, interactive: bool, **options: Any) -> None:
    """Print the script of a job that trains RECIPE, or runs PROGRAM."""
    job, site = sweeps.build(_make_request(options), scheduler, interactive)
    script = scheduler.render(job, site, None)
    command = shlex.join(["hpctrain", *sys.argv[1:]])
    head, _, rest = script.partition("\n")
    say(
        "\n".join([head, *[f"# {command} > FILE"] * command.isprintable(), rest]), end="", tabs=True
    )


def _make_request(options: dict[str, Any]) -> JobRequest:
    """Return the request that the values of a command's options describe."""
    sizes, overrides, recipe = (options.pop(name) for name in ("sizes", "sets", "recipe"))
    must_have_one_subject(recipe, options["program"])
    pairs = [parse_option(text) for text in options.pop("options")]
    names = [name for name, _ in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--option {repeated[0]}: expected it once, seen it {len(repeated)} times")
    return JobRequest(
        sizes=() if sizes is None else _parse_sizes(sizes),
        overrides=overrides,
        options=dict(pairs),
        **({} if recipe is None else {"recipe": recipe}),
        **options,
    )


def _parse_sizes(text: str) -> tuple[int, ...]:
    if not text:
        raise UsageError("--sizes: expected a value, seen ''")
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise UsageError(f"--sizes {text}: expected numbers of nodes, as in 1,2,4") from None


SUBMIT_EPILOG = """\b
Examples:
  hpctrain slurm submit my.toml --nodes 4 --gpus-per-node 4 --time 12:00:00 --site perlmutter
  hpctrain slurm submit my.toml --nodes 4 --option dependency=afterok:4711
  hpctrain slurm submit my.toml --nodes 4 --out runs/first      called again: continues that run
  hpctrain slurm submit my.toml --set optimizer.rate=0.1,0.3 --set run.seed=1,2 --out runs/sweep

Values between commas make a sweep: an array with a task for each combination. Called again with the
same --out, it submits those that are neither done nor in the queue.
"""


def submit(scheduler: Scheduler, context: click.Context, **options: Any) -> None:
    """Submit a job that trains RECIPE, or runs PROGRAM; print its id and the run's folder.

    The folder keeps the script, the job's id and the job's output.
    """
    try:
        for job, folder in jobs.submit_request(_make_request(options), scheduler):
            say(f"{job}  {folder}")
    except UsageError:
        raise
    except HpctrainError as error:  # a fault of the scheduler needs no traceback
        say(f"hpctrain: {error}", err=True)
        context.exit(error.exit_code)


STATUS_EPILOG = """\b
Examples:
  hpctrain slurm status
  hpctrain slurm status runs/first --json
  hpctrain slurm status studies/mine        a line for each size of `hpctrain scale --on slurm`
  hpctrain slurm status runs/first --wait 7200 && hpctrain report runs/first
"""


_STATUS_OPTIONS = (
    click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]..."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
    click.option(
        "--wait",
        "wait_s",
        type=float,
        metavar="S",
        help="Wait until all jobs have ended, at most S seconds.",
    ),
)


def status(
    scheduler: Scheduler,
    context: click.Context,
    folders: tuple[Path, ...],
    as_json: bool,
    wait_s: float | None,
) -> None:
    """Show the state of the jobs of DIR, a run or a study; by default of all runs in runs/.

    With --wait the exit code is 0 if all jobs are done, else 1. Without, it is 1 if the scheduler
    does not answer, else 0. The jobs may be of any scheduler.
    """
    rows = jobs.status(*folders, wait_s=wait_s or 0)
    say(to_json(rows, indent=1)) if as_json else print_table(rows)
    successes = (row["state"] != NO_ANSWER if wait_s is None else is_done(row) for row in rows)
    context.exit(0 if all(successes) else 1)


LOG_EPILOG = """\b
Examples:
  hpctrain slurm log runs/first
  hpctrain slurm log runs/first --follow        until the job has ended
  hpctrain slurm log studies/array --job 17_2
"""


_LOG_OPTIONS = (
    click.argument("run", type=click.Path(path_type=Path), metavar="DIR"),
    click.option("--job", metavar="ID", help="A job of DIR; default: the newest that has output."),
    click.option("-f", "--follow", is_flag=True, help="Wait for output until the job has ended."),
)


def log(
    scheduler: Scheduler, context: click.Context, run: Path, job: str | None, follow: bool
) -> None:
    """Print the output of a job of DIR, the folder of a run."""
    for line in jobs.log(run, job, follow):
        say(line, end="", tabs=True)


CANCEL_EPILOG = """\b
Examples:
  hpctrain slurm cancel runs/first
  hpctrain slurm cancel studies/mine        all jobs of `hpctrain scale --on slurm`
"""


_CANCEL_OPTIONS = (
    click.argument("folders", nargs=-1, required=True, type=click.Path(), metavar="DIR..."),
)


def cancel(scheduler: Scheduler, context: click.Context, folders: tuple[str, ...]) -> None:
    """Cancel all unfinished jobs of DIR, a run or a study; their ranks save if there is time.

    `hpctrain slurm submit` with the same --out continues the run.
    """
    lines = [f"cancelled: {job}" for job in jobs.cancel(*folders)]
    say("\n".join(lines) or "no unfinished job")


COMMANDS: tuple[CommandParts, ...] = (
    (render, RENDER_EPILOG, (*_JOB_OPTIONS, _INTERACTIVE)),
    (submit, SUBMIT_EPILOG, _JOB_OPTIONS),
    (status, STATUS_EPILOG, _STATUS_OPTIONS),
    (log, LOG_EPILOG, _LOG_OPTIONS),
    (cancel, CANCEL_EPILOG, _CANCEL_OPTIONS),
)
slurm, pbs, flux = (
    make_group(SCHEDULERS[name], EPILOG, COMMANDS) for name in ("slurm", "pbs", "flux")
)
