"""From the options of a command line to a Slurm job; the recipe is validated as well."""

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
_FREE = ("dropout", "recompute", "arguments", "folder")


def job_of(options: dict[str, Any], interactive: bool = False) -> tuple[Job, Site | None]:
    """Return the job and the site of `options`, the values of a command's options."""
    _must_be_text(options)
    site = load_site(options["site"]) if options["site"] else None
    sizes = tuple(_numbers(options["sizes"])) if options["sizes"] else ()
    nodes = max(sizes, default=1) if options["nodes"] is None else options["nodes"]
    direct = ("gpus_per_node", "cpus_per_task", "time", "warn_s", "max_restarts", "servers",
              "server_nodes", "out")  # fmt: skip
    engine, overrides = _engine(options)
    job = Job(
        recipe=options["name"],
        nodes=nodes,
        tasks_per_node=_tasks_per_node(options["ranks"], options["tasks_per_node"], nodes),
        sizes=sizes,
        arguments=tuple(_arguments(engine, options["epochs"], options["sets"])),
        name=options["job_name"],
        options=dict(parse_option(text) for text in options["options"]),
        interactive=interactive,
        **{key: options[key] for key in direct},
    )
    check_job(job, site)
    spec = recipe.load(job.recipe, overrides)
    for size in job.sizes or (job.nodes,):
        _must_fit(spec, total_ranks(replace(job, nodes=size), site), size)
    return job, site


def _must_fit(spec: Recipe, size: int, nodes: int) -> None:
    """Raise UsageError, with the size, if `train` would refuse to start."""
    try:
        spec.must_fit(size, nodes)
    except UsageError as error:
        raise UsageError(f"a job of {size} ranks on {nodes} nodes: {error}") from None


def must_be_same_recipe(options: dict[str, Any], run: Path) -> None:
    """Raise UsageError if the checkpoints in `run` belong to another recipe than the job's.

    Another model, optimizer or data: `train --resume` would refuse them, or continue silently, only
    after the job has waited in the queue.
    """
    file = run / run_folder.RECIPE
    if not file.exists() or not checkpoint.listing(run):
        return
    before, spec = recipe.load(str(file)), recipe.load(options["name"], _engine(options)[1])
    if wrong := [table for table in ("model", "data", "optimizer") if _differ(before, spec, table)]:
        differences = "; ".join(
            f"[{table}] there {before.tables[table]}, asked for {spec.tables[table]}"
            for table in wrong
        )
        raise UsageError(
            f"--out {run} holds checkpoints of another recipe: {differences}. Name another --out, "
            f"or go on with what was trained there: {file}"
        )


def _differ(before: Recipe, spec: Recipe, table: str) -> bool:
    a, b = getattr(before, table), getattr(spec, table)
    if type(a) is not type(b) or table != "model":
        return type(a) is not type(b)
    return any(vars(a)[key] != vars(b)[key] for key in vars(a).keys() - set(_FREE))


def _must_be_text(options: dict[str, Any]) -> None:
    """Raise UsageError for an empty option, as from an unset variable, and for one with
    characters that a terminal would not show."""
    words = {"name": options["job_name"], "out": options["out"], "arguments": options["sets"]}
    if wrong := text_faults(Job(options["name"], **words)):
        raise UsageError("\n".join(wrong))
    for name in ("sizes", "site", "job_name", "out"):
        if options[name] == "":
            raise UsageError(f"--{name.replace('_', '-')}: expected a value, seen ''")


def _engine(options: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Return the --engine of the job, and its overrides of the recipe.

    With --servers, and an engine without servers in the recipe, the engine is ps-sync.
    """
    servers, engine = options["servers"], options["engine"]
    overrides = [f"engine.kind={engine}"] * (engine is not None)
    if options["epochs"] is not None:
        overrides.append(f"run.epochs={options['epochs']}")
    overrides += options["sets"]
    spec = recipe.load(options["name"], overrides)
    if not servers:
        return engine, overrides
    if not isinstance(spec.engine, ServerOptions):
        if engine is not None:
            raise UsageError(f"--servers {servers}: --engine {engine} has no servers; take ps-sync")
        engine, overrides = "ps-sync", ["engine.kind=ps-sync", *overrides]
    return engine, [*overrides, f"engine.servers={servers}", "engine.placement=dedicated"]


def _arguments(engine: str | None, epochs: int | None, sets: Sequence[str]) -> list[str]:
    chosen = ["--engine", engine] if engine else []
    chosen += ["--epochs", str(epochs)] if epochs is not None else []
    return [*chosen, *(word for text in sets for word in ("--set", text))]


def _tasks_per_node(total_ranks: int | None, tasks_per_node: int | None, nodes: int) -> int | None:
    if total_ranks is None:
        return tasks_per_node
    if tasks_per_node is not None:
        raise UsageError("--ranks and --tasks-per-node exclude each other: give one of them")
    if nodes < 1 or total_ranks % nodes:
        raise UsageError(f"--ranks {total_ranks} cannot be shared out evenly among --nodes {nodes}")
    return total_ranks // nodes


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"--sizes {text}: expected numbers of nodes, as in 1,2,4") from None
