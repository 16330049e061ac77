"""The request of a training run as a job: from its fields to a job with a validated recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hpctrain import checkpoint
from hpctrain.cluster.slurm.job import Job, JobOptions, check_job, text_faults, total_ranks
from hpctrain.cluster.slurm.site import Site, load_site
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.engines.parameter_server.roles import ServerOptions
from hpctrain.training import recipe
from hpctrain.training.recipe import Recipe

#: Options of a model that a resumed run may change.
_CHANGEABLE_OPTIONS = ("dropout", "recompute", "arguments", "folder")


@dataclass(frozen=True)
class JobRequest(JobOptions):
    """A recipe or a program to submit; the site, or a default, decides on a field that is None."""

    nodes: int | None = None  #: 1, or the largest of `sizes`
    ranks: int | None = None  #: on all nodes together, servers excluded
    site: str | None = None  #: a profile's name, or a .toml file
    engine: str | None = None
    epochs: int | None = None
    overrides: Sequence[str] = ()  #: TABLE.KEY=VALUE, as for --set
    job_name: str | None = None


def build_job(
    request: JobRequest,
    interactive: bool = False,
    check: Callable[[Job, Site | None], None] = check_job,
) -> tuple[Job, Site | None]:
    """Return the job and its site; raise UsageError if the recipe or the resources do not fit.

    `check` raises UsageError for a job that its scheduler cannot run.
    """
    _must_be_printable(request)
    site = load_site(request.site) if request.site else None
    nodes = max(request.sizes, default=1) if request.nodes is None else request.nodes
    engine, overrides = (request.engine, []) if request.program else choose_engine(request)
    equal_fields = {field.name: getattr(request, field.name) for field in fields(JobOptions)}
    arguments = ["--engine", engine] if engine else []
    arguments += ["--epochs", str(request.epochs)] if request.epochs is not None else []
    job = replace(
        Job(**equal_fields),
        nodes=nodes,
        tasks_per_node=_tasks_per_node(request.ranks, request.tasks_per_node, nodes),
        sizes=tuple(request.sizes),
        arguments=(*arguments, *(word for text in request.overrides for word in ("--set", text))),
        name=request.job_name,
        interactive=interactive,
    )
    check(job, site)
    if not job.program:
        _must_fit(job, site, overrides)
    return job, site


def _must_fit(job: Job, site: Site | None, overrides: Sequence[str]) -> None:
    """Raise UsageError if the recipe cannot train on the ranks of the job."""
    job_recipe = recipe.load(job.recipe, overrides)
    for size in job.sizes or (job.nodes,):
        ranks = total_ranks(replace(job, nodes=size), site)
        try:
            job_recipe.must_fit(ranks, size)
        except UsageError as error:  # `train` would refuse to start
            raise UsageError(f"a job of {ranks} ranks on {size} nodes: {error}") from None


def must_have_one_subject(recipe: str | None, program: Sequence[str]) -> None:
    """Raise UsageError unless there is either a recipe or a program."""
    if (recipe is None) == (not program):
        subjects = (
            "neither" if recipe is None else f"the recipe {recipe} and the program {program[0]}"
        )
        raise UsageError(f"expected a recipe, or a program after `--`, seen {subjects}")


def must_be_same_recipe(request: JobRequest, run: Path) -> None:
    """Raise UsageError if checkpoints in `run` have another model, optimizer or data than the job.

    `train --resume` would refuse such checkpoints, or silently continue, only after the job has
    waited in the queue.
    """
    file = run / run_folder.RECIPE
    if request.program or not file.exists() or not checkpoint.listing(run):
        return
    trained_recipe = recipe.load(str(file))
    job_recipe = recipe.load(request.recipe, choose_engine(request)[1])
    tables = ("model", "data", "optimizer")
    differing_tables = [
        table for table in tables if _tables_differ(trained_recipe, job_recipe, table)
    ]
    if differing_tables:
        differences = "; ".join(
            f"[{table}] there {trained_recipe.tables[table]}, asked for {job_recipe.tables[table]}"
            for table in differing_tables
        )
        raise UsageError(
            f"--out {run} holds checkpoints of another recipe: {differences}. Name another --out, "
            f"or continue with the recipe that was trained there: {file}"
        )


def _tables_differ(trained_recipe: Recipe, job_recipe: Recipe, table: str) -> bool:
    trained_options, job_options = getattr(trained_recipe, table), getattr(job_recipe, table)
    if type(trained_options) is not type(job_options) or table != "model":
        return type(trained_options) is not type(job_options)
    keys = vars(trained_options).keys() - set(_CHANGEABLE_OPTIONS)
    return any(vars(trained_options)[key] != vars(job_options)[key] for key in keys)


def _must_be_printable(request: JobRequest) -> None:
    """Raise UsageError for empty texts, as from an unset variable, or unprintable characters."""
    job = Job(
        request.recipe, request.program, name=request.job_name, out=request.out,
        arguments=tuple(request.overrides),
    )  # fmt: skip
    if fault_texts := text_faults(job):
        raise UsageError("\n".join(fault_texts))
    for name in ("site", "job_name", "out"):  # a field is an option of the command line
        if getattr(request, name) == "":
            raise UsageError(f"--{name.replace('_', '-')}: expected a value, seen ''")


def choose_engine(request: JobRequest) -> tuple[str | None, list[str]]:
    """Return the job's --engine and its overrides of the recipe.

    With servers the engine is ps-sync if the recipe's engine has no servers.
    """
    engine = request.engine
    overrides = [f"engine.kind={engine}"] * (engine is not None)
    if request.epochs is not None:
        overrides.append(f"run.epochs={request.epochs}")
    overrides += request.overrides
    job_recipe = recipe.load(request.recipe, overrides)
    if not request.servers:
        return engine, overrides
    if not isinstance(job_recipe.engine, ServerOptions):
        if engine is not None:
            raise UsageError(
                f"--servers {request.servers}: --engine {engine} has no servers; use ps-sync"
            )
        engine, overrides = "ps-sync", ["engine.kind=ps-sync", *overrides]
    servers = [f"engine.servers={request.servers}", "engine.placement=dedicated"]
    return engine, [*overrides, *servers]


def _tasks_per_node(total_ranks: int | None, tasks_per_node: int | None, nodes: int) -> int | None:
    if total_ranks is None:
        return tasks_per_node
    if tasks_per_node is not None:
        raise UsageError("--ranks and --tasks-per-node exclude each other: give one of them")
    if nodes < 1 or total_ranks % nodes:
        raise UsageError(f"--ranks {total_ranks} cannot be shared out evenly among --nodes {nodes}")
    return total_ranks // nodes
