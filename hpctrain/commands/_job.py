"""Build a Slurm job from the options of a command line, and validate its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain import checkpoint
from hpctrain.cluster.slurm.job import Job, check_job, text_faults, total_ranks
from hpctrain.cluster.slurm.sbatch import parse_option
from hpctrain.cluster.slurm.site import Site, load_site
from hpctrain.core.errors import UsageError
from hpctrain.engines.parameter_server.roles import ServerOptions
from hpctrain.run_files import run_folder
from hpctrain.training import recipe
from hpctrain.training.recipe import Recipe

#: Options of a model that a resumed run may change.
_CHANGEABLE_OPTIONS = ("dropout", "recompute", "arguments", "folder")


def build_job(options: dict[str, Any], interactive: bool = False) -> tuple[Job, Site | None]:
    """Return the job and the site that the values of a command's options describe."""
    _must_be_printable(options)
    site = load_site(options["site"]) if options["site"] else None
    sizes = tuple(_parse_sizes(options["sizes"])) if options["sizes"] else ()
    nodes = max(sizes, default=1) if options["nodes"] is None else options["nodes"]
    direct_options = ("gpus_per_node", "cpus_per_task", "time", "warn_s", "max_restarts", "servers",
              "server_nodes", "out")  # fmt: skip
    engine, overrides = _choose_engine(options)
    job = Job(
        recipe=options["name"],
        nodes=nodes,
        tasks_per_node=_tasks_per_node(options["ranks"], options["tasks_per_node"], nodes),
        sizes=sizes,
        arguments=tuple(_train_arguments(engine, options["epochs"], options["sets"])),
        name=options["job_name"],
        options=dict(parse_option(text) for text in options["options"]),
        interactive=interactive,
        **{key: options[key] for key in direct_options},
    )
    check_job(job, site)
    job_recipe = recipe.load(job.recipe, overrides)
    for size in job.sizes or (job.nodes,):
        _must_fit_ranks(job_recipe, total_ranks(replace(job, nodes=size), site), size)
    return job, site


def _must_fit_ranks(job_recipe: Recipe, size: int, nodes: int) -> None:
    """Raise UsageError, with the size of the job, if `train` would refuse to start."""
    try:
        job_recipe.must_fit(size, nodes)
    except UsageError as error:
        raise UsageError(f"a job of {size} ranks on {nodes} nodes: {error}") from None


def must_be_same_recipe(options: dict[str, Any], run: Path) -> None:
    """Raise UsageError if checkpoints in `run` have another model, optimizer or data than the job.

    `train --resume` would refuse such checkpoints, or silently continue, only after the job has
    waited in the queue.
    """
    file = run / run_folder.RECIPE
    if not file.exists() or not checkpoint.listing(run):
        return
    trained_recipe = recipe.load(str(file))
    job_recipe = recipe.load(options["name"], _choose_engine(options)[1])
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


def _must_be_printable(options: dict[str, Any]) -> None:
    """Raise UsageError for empty options, as from an unset variable, or unprintable characters."""
    texts = {"name": options["job_name"], "out": options["out"], "arguments": options["sets"]}
    if faults := text_faults(Job(options["name"], **texts)):
        raise UsageError("\n".join(faults))
    for name in ("sizes", "site", "job_name", "out"):
        if options[name] == "":
            raise UsageError(f"--{name.replace('_', '-')}: expected a value, seen ''")


def _choose_engine(options: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Return the job's --engine and its overrides of the recipe.

    With --servers the engine is ps-sync if the recipe's engine has no servers.
    """
    server_count, engine = options["servers"], options["engine"]
    overrides = [f"engine.kind={engine}"] * (engine is not None)
    if options["epochs"] is not None:
        overrides.append(f"run.epochs={options['epochs']}")
    overrides += options["sets"]
    job_recipe = recipe.load(options["name"], overrides)
    if not server_count:
        return engine, overrides
    if not isinstance(job_recipe.engine, ServerOptions):
        if engine is not None:
            raise UsageError(
                f"--servers {server_count}: --engine {engine} has no servers; use ps-sync"
            )
        engine, overrides = "ps-sync", ["engine.kind=ps-sync", *overrides]
    return engine, [*overrides, f"engine.servers={server_count}", "engine.placement=dedicated"]


def _train_arguments(engine: str | None, epochs: int | None, sets: Sequence[str]) -> list[str]:
    arguments = ["--engine", engine] if engine else []
    arguments += ["--epochs", str(epochs)] if epochs is not None else []
    return [*arguments, *(word for text in sets for word in ("--set", text))]


def _tasks_per_node(total_ranks: int | None, tasks_per_node: int | None, nodes: int) -> int | None:
    if total_ranks is None:
        return tasks_per_node
    if tasks_per_node is not None:
        raise UsageError("--ranks and --tasks-per-node exclude each other: give one of them")
    if nodes < 1 or total_ranks % nodes:
        raise UsageError(f"--ranks {total_ranks} cannot be shared out evenly among --nodes {nodes}")
    return total_ranks // nodes


def _parse_sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise UsageError(f"--sizes {text}: expected numbers of nodes, as in 1,2,4") from None
