"""From the words of a command line to a job for Slurm; the recipe is read and checked as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain import checkpoint, recipe, rundir
from hpctrain.cluster import job as jobs
from hpctrain.cluster import sbatch
from hpctrain.cluster import site as sites
from hpctrain.cluster.job import Job
from hpctrain.cluster.site import Site
from hpctrain.engines.roles import ServerOptions
from hpctrain.errors import UsageError
from hpctrain.recipe import Recipe

#: Options of a model that a run which is resumed may change.
_FREE = ("dropout", "recompute", "arguments", "folder")


def asked_for(given: dict[str, Any], interactive: bool = False) -> tuple[Job, Site | None]:
    """Return the job and the site that `given`, the values of a command's options, describe."""
    _must_say_something(given)
    site = sites.load(given["site"]) if given["site"] else None
    sizes = tuple(_numbers(given["sizes"])) if given["sizes"] else ()
    nodes = max(sizes, default=1) if given["nodes"] is None else given["nodes"]
    direct = ("gpus_per_node", "cpus_per_task", "time", "warn_s", "max_restarts", "servers",
              "server_nodes", "out")  # fmt: skip
    engine, overrides = _engine(given)
    job = Job(
        recipe=given["name"],
        nodes=nodes,
        tasks_per_node=_tasks_per_node(given["ranks"], given["tasks_per_node"], nodes),
        sizes=sizes,
        arguments=tuple(_arguments(engine, given["epochs"], given["sets"])),
        name=given["job_name"],
        options=dict(sbatch.named(text) for text in given["options"]),
        interactive=interactive,
        **{key: given[key] for key in direct},
    )
    jobs.check(job, site)
    spec = recipe.load(job.recipe, overrides)
    for size in job.sizes or (job.nodes,):
        _must_fit(spec, jobs.ranks(replace(job, nodes=size), site), size)
    return job, site


def _must_fit(spec: Recipe, ranks: int, nodes: int) -> None:
    """Raise UsageError, which names the size, for what `train` would refuse to begin with."""
    try:
        spec.must_fit(ranks, nodes)
    except UsageError as error:
        raise UsageError(f"a job of {ranks} ranks on {nodes} nodes: {error}") from None


def must_go_on(given: dict[str, Any], run: Path) -> None:
    """Raise UsageError where the checkpoints in `run` are not of the recipe that is asked for.

    They are of another model or optimizer, or it was trained on other data: `train --resume` would
    say so, or go on in silence, when the job has waited for its turn.
    """
    file = run / rundir.RECIPE
    if not file.exists() or not checkpoint.listing(run):
        return
    before, spec = recipe.load(str(file)), recipe.load(given["name"], _engine(given)[1])
    if wrong := [what for what in ("model", "data", "optimizer") if _differ(before, spec, what)]:
        told = "; ".join(
            f"[{what}] there {before.tables[what]}, asked for {spec.tables[what]}" for what in wrong
        )
        raise UsageError(
            f"--out {run} holds checkpoints of another recipe: {told}. Name another --out, or go "
            f"on with what was trained there: {file}"
        )


def _differ(before: Recipe, spec: Recipe, table: str) -> bool:
    a, b = getattr(before, table), getattr(spec, table)
    if type(a) is not type(b) or table != "model":
        return type(a) is not type(b)
    return any(vars(a)[key] != vars(b)[key] for key in vars(a).keys() - set(_FREE))


def _must_say_something(given: dict[str, Any]) -> None:
    """Raise UsageError for an option that is there and empty, as of a variable that is not set,
    and for one that a terminal would not show as it is."""
    words = {"name": given["job_name"], "out": given["out"], "arguments": given["sets"]}
    if wrong := jobs.texts(Job(given["name"], **words)):
        raise UsageError("\n".join(wrong))
    for name in ("sizes", "site", "job_name", "out"):
        if given[name] == "":
            raise UsageError(f"--{name.replace('_', '-')}: expected a value, seen ''")


def _engine(given: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Return the --engine of the job, and all that it sets of the recipe.

    Where servers are asked for, and the recipe's engine has none, ps-sync is taken.
    """
    servers, engine = given["servers"], given["engine"]
    overrides = [f"engine.kind={engine}"] * (engine is not None)
    if given["epochs"] is not None:
        overrides.append(f"run.epochs={given['epochs']}")
    overrides += given["sets"]
    spec = recipe.load(given["name"], overrides)
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
