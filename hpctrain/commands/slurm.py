"""`hpctrain slurm`: its subcommands render a job, submit it, and tell what became of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain import engines, recipe, rundir
from hpctrain.cluster import job as jobs
from hpctrain.cluster import site as sites
from hpctrain.cluster import submit as queue
from hpctrain.cluster.job import Job
from hpctrain.cluster.site import Site
from hpctrain.cluster.slurm import render as script
from hpctrain.engines.roles import ServerOptions
from hpctrain.errors import UsageError

EPILOG = """\b
Examples:
  hpctrain slurm render digits --nodes 4 --site perlmutter --gpus-per-node 4 --time 2:00:00
  hpctrain slurm submit my.toml --nodes 4 --ranks 16 --option account=m1234 --set run.epochs=90
  hpctrain slurm submit digits --nodes 4 --servers 2
  hpctrain slurm status --wait 3600 runs/digits-20260101-120000

A job is stopped in time, put back into the queue, and goes on at the step where it stopped. What
`render` prints is what `sbatch` takes.
"""


WIDTH = 130  # where there is no terminal


@click.group(epilog=EPILOG)
def slurm() -> None:
    """Render a job for Slurm, submit it, and see what became of it."""


def _of_a_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the argument and options that describe a job."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


OPTIONS = [
    click.argument("name", metavar="RECIPE"),
    click.option("--nodes", type=int, metavar="N", help="1, or the largest of --sizes."),
    click.option("--ranks", type=int, metavar="N", help="Of all nodes together."),
    click.option("--tasks-per-node", type=int, metavar="N", help="Ranks on each; one per GPU."),
    click.option("--gpus-per-node", type=int, default=0, metavar="N", help="None unless given."),
    click.option("--cpus-per-task", type=int, metavar="N", help="Cores of a rank."),
    click.option("--time", default="1:00:00", metavar="TIME", help="As for sbatch; an hour."),
    click.option("--site", metavar="NAME", help=f"{', '.join(sites.names())}, or a .toml file."),
    click.option("--servers", type=int, default=0, metavar="N", help="Ranks that serve, besides."),
    click.option(
        "--server-nodes", type=int, default=0, metavar="N", help="Nodes of their own for these."
    ),
    click.option("--sizes", metavar="N,N,...", help="A job array over these numbers of nodes."),
    click.option("--engine", metavar="KIND", help=f"One of: {', '.join(engines.ENGINES)}."),
    click.option("--set", "sets", multiple=True, metavar="TABLE.KEY=VALUE", help="As for train."),
    click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Of sbatch."),
    click.option("--job-name", metavar="NAME", help="The recipe's unless given."),
    click.option(
        "--warn-s", type=int, default=120, metavar="S", help="Stop so long before the end: 120."
    ),
    click.option("--max-restarts", type=int, default=20, metavar="N", help="20 unless given."),
    click.option("--out", metavar="DIR", help="The run's folder."),
]


RENDER = """\b
Examples:
  hpctrain slurm render digits --nodes 2 --tasks-per-node 4 --option account=m1234
  hpctrain slurm render my.toml --nodes 4 --gpus-per-node 4 --site leonardo > job.sbatch
  hpctrain slurm render digits --tasks-per-node 4 --interactive > try.sh
"""


@slurm.command(epilog=RENDER)
@_of_a_job
@click.option("--interactive", is_flag=True, help="A script that calls salloc.")
def render(site: str | None, interactive: bool, **given: Any) -> None:
    """Print the script of a job that trains RECIPE."""
    click.echo(script(_job(given, _site(site), interactive), _site(site)), nl=False)


SUBMIT = """\b
Examples:
  hpctrain slurm submit my.toml --nodes 4 --gpus-per-node 4 --time 12:00:00 --site perlmutter
  hpctrain slurm submit my.toml --nodes 4 --option dependency=afterok:4711
  hpctrain slurm submit my.toml --nodes 4 --out runs/first      again: goes on with that run
"""


@slurm.command(epilog=SUBMIT)
@_of_a_job
def submit(site: str | None, **given: Any) -> None:
    """Submit a job that trains RECIPE; prints its id and the run's folder.

    The folder keeps the script, the job's id and what the job says.
    """
    job = _job(given, _site(site))
    folder = Path(job.out or rundir.default_path(jobs.job_name(job)))
    text = script(replace(job, out=str(folder)), _site(site))
    click.echo(f"{queue.submit(text, folder)}  {folder}")


STATUS = """\b
Examples:
  hpctrain slurm status
  hpctrain slurm status runs/first --json
  hpctrain slurm status runs/first --wait 7200 && hpctrain report runs/first
"""


@slurm.command(epilog=STATUS)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
@click.option("--wait", "wait_s", type=float, metavar="S", help="Until all have ended, S at most.")
@click.pass_context
def status(
    context: click.Context, folders: tuple[Path, ...], as_json: bool, wait_s: float | None
) -> None:
    """Show what became of the jobs of DIR, or of all runs in runs/.

    With --wait it ends with 0 if all are done, else with 1.
    """
    folders = folders or tuple(sorted(path.parent for path in Path("runs").glob(f"*/{queue.JOBS}")))
    if not folders:
        raise UsageError("no run in runs/ was submitted; name the folder of one")
    rows = queue.wait(folders, wait_s or 0)
    click.echo(json.dumps(rows, indent=1)) if as_json else _show(rows)
    if wait_s is not None:
        context.exit(0 if all(row["status"] == "done" for row in rows) else 1)


def _site(name: str | None) -> Site | None:
    return sites.load(name) if name is not None else None


def _job(given: dict[str, Any], site: Site | None, interactive: bool = False) -> Job:
    """Return the job that the command line describes; the recipe is read and checked as well."""
    sizes = tuple(_numbers(given["sizes"])) if given["sizes"] else ()
    nodes = given["nodes"] or max(sizes, default=1)
    direct = ("gpus_per_node", "cpus_per_task", "time", "warn_s", "max_restarts", "servers",
              "server_nodes", "out")  # fmt: skip
    engine, overrides = _engine(given)
    job = Job(
        recipe=given["name"],
        nodes=nodes,
        tasks_per_node=_tasks_per_node(given["ranks"], given["tasks_per_node"], nodes),
        sizes=sizes,
        arguments=tuple(_arguments(engine, given["sets"])),
        name=given["job_name"],
        options=dict(_option(text) for text in given["options"]),
        interactive=interactive,
        **{key: given[key] for key in direct},
    )
    jobs.check(job, site)
    spec = recipe.load(job.recipe, overrides)
    for size in job.sizes or (job.nodes,):
        engines.workers_of(spec.engine, jobs.ranks(replace(job, nodes=size), site))
    return job


def _engine(given: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Return the --engine of the job, and all that it sets of the recipe.

    Where servers are asked for, and the recipe's engine has none, ps-sync is taken.
    """
    servers, engine = given["servers"], given["engine"]
    overrides = [f"engine.kind={engine}"] * (engine is not None) + list(given["sets"])
    spec = recipe.load(given["name"], overrides)
    if not servers:
        return engine, overrides
    if not isinstance(spec.engine, ServerOptions):
        if engine is not None:
            raise UsageError(f"--servers {servers}: --engine {engine} has no servers; take ps-sync")
        engine, overrides = "ps-sync", ["engine.kind=ps-sync", *overrides]
    return engine, [*overrides, f"engine.servers={servers}", "engine.placement=dedicated"]


def _arguments(engine: str | None, sets: Sequence[str]) -> list[str]:
    chosen = ["--engine", engine] if engine else []
    return [*chosen, *(word for text in sets for word in ("--set", text))]


def _tasks_per_node(ranks: int | None, tasks_per_node: int | None, nodes: int) -> int | None:
    if ranks is None:
        return tasks_per_node
    if tasks_per_node is not None:
        raise UsageError("--ranks and --tasks-per-node say the same: give one of them")
    if nodes < 1 or ranks % nodes:
        raise UsageError(f"--ranks {ranks} cannot be shared out evenly among --nodes {nodes}")
    return ranks // nodes


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"--sizes {text}: expected numbers of nodes, as in 1,2,4") from None


def _option(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.lstrip("-"), value


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row per job, and below in full why each is where it is."""
    out = Console()
    out = out if out.is_terminal else Console(width=WIDTH)
    drawn = Table("job", "state", "restarts", "run", "step", "loss", "accuracy")
    drawn.add_column("folder", overflow="fold")  # to be copied
    for row in rows:
        drawn.add_row(*map(Text, _cells(row)))
    out.print(drawn)
    for row in rows:
        if why := queue.meaning(row):
            out.print(Text(f"{row['job']}: {why}"), soft_wrap=True)


def _cells(row: dict[str, Any]) -> list[str]:
    def number(key: str) -> str:
        return "-" if row[key] is None else f"{row[key]:.4f}"

    restarts = "-" if row["restarts"] is None else str(row["restarts"])
    status = row["status"] or ("-" if row["step"] is None else "training")
    return [row["job"], row["state"], restarts, status, _progress(row), number("train_loss"),
            number("test_accuracy"), row["run"]]  # fmt: skip


def _progress(row: dict[str, Any]) -> str:
    if row["step"] is None:
        return "-"
    if row["steps"]:
        return f"{row['step']} of {row['steps']}"
    return f"{row['step']}, epoch {row['epoch']} of {row['epochs']}"
