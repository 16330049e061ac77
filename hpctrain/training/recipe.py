"""Recipes: a whole run as tables of options, read from TOML and checked before anything starts.

Each table is read by the package that it configures; here they are only joined.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from hpctrain import data, engines, nn, optim
from hpctrain.collectives.direct import require_one_node
from hpctrain.core import config, files
from hpctrain.core.config import overrides, paths, toml, usercode
from hpctrain.core.config.usercode import Code
from hpctrain.core.errors import UsageError
from hpctrain.core.opening import NAMED
from hpctrain.gradients.reducer import ALLREDUCE_ONLY_DEFAULTS, WireOptions
from hpctrain.parallel.options import MeshOptions, PipelineOptions
from hpctrain.training import split_model
from hpctrain.training.callbacks import EarlyStop
from hpctrain.training.faults import FaultsOptions
from hpctrain.training.loggers.options import LogOptions
from hpctrain.training.run_options import (
    BatchOptions,
    CheckpointOptions,
    ElasticOptions,
    LossOptions,
    RunOptions,
    Sizes,
    TraceOptions,
)
from hpctrain.tuning.select import find_allreduce

Table = dict[str, Any]
#: Tables that an options class reads whole.
OPTIONS: dict[str, Any] = {
    "mesh": MeshOptions,
    "pipeline": PipelineOptions,
    "elastic": ElasticOptions,
    "checkpoint": CheckpointOptions,
    "faults": FaultsOptions,
    "trace": TraceOptions,
    "log": LogOptions,
}


@dataclass(frozen=True)
class Recipe:
    """A run, checked; `tables` is the recipe as read, to be written beside the results."""

    run: RunOptions
    model: Any
    loss: LossOptions | None  #: None: the model's own loss
    data: Any
    batch: BatchOptions
    optimizer: Any
    schedule: Any
    engine: Any
    mesh: MeshOptions
    pipeline: PipelineOptions
    elastic: ElasticOptions
    checkpoint: CheckpointOptions
    faults: FaultsOptions
    early_stop: EarlyStop | None
    trace: TraceOptions
    log: LogOptions
    init: Path | None
    code: Code
    tables: Table  #: with absolute paths
    written: Mapping[str, str]  #: absolute path: text in the recipe

    def toml(self) -> str:
        """Return the resolved recipe as TOML; training it again repeats the run."""
        return tomli_w.dumps(self.tables | ({paths.PATHS: self.written} if self.written else {}))

    def must_fit(self, ranks: int, nodes: int = 1) -> Sizes:
        """Return the sizes of a training on `ranks` on `nodes` nodes.

        Raises UsageError if they cannot train this, whatever the data: engine, algorithm, batch and
        planted faults each constrain the number of ranks.
        """
        replicas, workers = self.mesh.workers(ranks), self.workers(ranks)
        batch = self.batch.size(workers)
        engines.must_fit(self.engine, replicas, batch)
        self.faults.check(ranks, workers)
        if self.engine.algorithm == "direct":
            require_one_node(nodes)
        rate = self.optimizer.rate * self.batch.rate_factor(workers)
        return Sizes(batch, rate, engines.updates_per_step(self.engine, replicas))

    def workers(self, ranks: int) -> int:
        """Return the number of workers among `ranks`; raise UsageError if the ranks do not fit."""
        return self.engine.workers(self.mesh.workers(ranks))

    @property
    def sha256(self) -> str:
        """Return the hash of the resolved recipe, with its paths as they were written."""
        tables = paths.as_written(self.tables, data.path_keys(self.tables), self.written)
        return hashlib.sha256(tomli_w.dumps(tables).encode()).hexdigest()


def load(name: str, settings: Iterable[str] = ()) -> Recipe:
    """Return the built-in recipe `name`, or the recipe in file `name`, with `table.key=value`s.

    The last setting of a key counts, and removes an excluded key from the file. Raises UsageError
    with every fault of a table, and the nearest name.
    """
    folder = Path(name).parent if _is_file(name) else "."
    tables = overrides.apply(read_tables(name), settings := tuple(settings))
    paths.make_absolute(tables, data.path_keys(tables), ".")  # of the settings
    try:
        return check(tables, folder)
    except UsageError as error:
        if type(error) is not UsageError or not _is_fault_of(name, str(error), bool(settings)):
            raise
        lines = str(error).splitlines()
        raise UsageError("\n".join(f"{name}: {line}" for line in lines)) from error


def _is_fault_of(name: str, fault: str, is_changed: bool) -> bool:
    """Return whether a fault is of the file `name`, rather than of the settings that change it."""
    if not _is_file(name) or not is_changed:
        return _is_file(name)
    try:
        check(read_tables(name), Path(name).parent)
    except UsageError as error:
        return str(error) == fault
    return False


def built_in() -> list[str]:
    """Return the names of the recipes that come with the package."""
    files = resources.files("hpctrain.training.recipes").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def read_tables(name: str, extending: tuple[str, ...] = ()) -> Table:
    """Return the tables of a recipe, merged into the tables of the recipe that it `extends`.

    `extending`: the recipes that extend this one, by way of each other.
    """
    tables = toml.parse(source(name), f"recipe {name}")
    base, folder = tables.pop("extends", None), Path(name).parent if _is_file(name) else "."
    if base is None:
        paths.make_absolute(tables, data.path_keys(tables), folder)
        return tables
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"recipe {name}: extends: expected the name of a recipe or a .toml file, seen "
            f"{files.brief(base)}"
        )
    if _is_file(base):
        base = os.path.normpath(Path(folder) / base)
    chain = (*extending, os.path.normpath(name))
    if base in chain:
        raise UsageError(f"recipe {name} extends itself: {', '.join((*chain, base))}")
    try:
        base_tables = read_tables(base, chain)
        paths.make_absolute(tables, data.path_keys(overrides.merge(base_tables, tables)), folder)
        return overrides.merge(base_tables, tables)
    except files.MissingError:
        raise UsageError(f"recipe {name} extends '{base}', which does not exist") from None


def check(tables: Mapping[str, Any], folder: str | Path = ".") -> Recipe:
    """Return the recipe that `tables` spell out; modules that it names lie in `folder`.

    If [code] names a folder, that counts: the recipe is then of an earlier run.
    """
    tables, written = _checked_tables(tables, folder)
    copies = {name: dict(tables.get(name, {})) for name in overrides.TABLES}
    keys = [option.name for option in fields(BatchOptions)]
    batch_table = {key: copies["optimizer"].pop(key) for key in keys if key in copies["optimizer"]}
    init, run = _init_path(copies["model"].pop("init", None)), _run_options(copies["run"])
    code = usercode.read(copies, [callback.kind for callback in run.callback_options], str(folder))
    tables.pop("code", None)
    tables |= code.tables()
    has_loss, has_early_stop = "loss" in tables, "early_stop" in tables
    schedule = {"kind": "constant", **copies["schedule"]}
    recipe = Recipe(
        run=run,
        model=nn.read(copies["model"], code.folder),
        loss=config.read(LossOptions, copies["loss"], "loss") if has_loss else None,
        data=data.read(copies["data"], code.folder),
        batch=_batch_options(batch_table),
        optimizer=config.read_kind(optim.OPTIMIZERS, copies["optimizer"], "optimizer", keys),
        schedule=config.read_kind(optim.SCHEDULES, schedule, "schedule"),
        engine=_engine_options(copies["engine"], copies["wire"]),
        **{name: config.read(options, copies[name], name) for name, options in OPTIONS.items()},
        early_stop=config.read(EarlyStop, copies["early_stop"], "early_stop")
        if has_early_stop
        else None,
        init=init,
        code=code,
        tables={"schema": 1, **tables},
        written=paths.used(tables, data.path_keys(tables), written),
    )
    split_model.check(recipe.mesh, recipe.pipeline, recipe.engine, run.precision, recipe.faults)
    recipe.pipeline.check(recipe.mesh.pipe, recipe.batch.micro_batches)
    return recipe


def _checked_tables(tables: Mapping[str, Any], folder: str | Path) -> tuple[Table, dict[str, str]]:
    """Return the tables with absolute paths, and the text of each path in the recipe."""
    toml.must_be_plain(tables, "recipe")
    tables = dict(tables)
    written = paths.take_written(tables)
    paths.make_absolute(tables, data.path_keys(tables), folder)
    written |= paths.take_written(tables)
    if tables.pop("schema", None) != 1:
        raise UsageError("a recipe begins with 'schema = 1', the format that this version reads")
    for name, table in tables.items():
        config.pick(dict.fromkeys(overrides.TABLES), name, "table")
        overrides.must_be_table(name, table)
    return tables, written


def _is_file(name: str) -> bool:
    return name.endswith(".toml") or "/" in name


def source(name: str) -> str:
    """Return the text of a recipe; raise UsageError if there is none."""
    if _is_file(name):
        return files.read_text(name, toml.LIMIT_BYTES, NAMED)
    if name not in built_in():
        raise UsageError(config.unknown("recipe", name, built_in()) + " (or name a .toml file)")
    return resources.files("hpctrain.training.recipes").joinpath(f"{name}.toml").read_text()


def _run_options(table: Table) -> RunOptions:
    options: RunOptions = _exactly_one(
        config.read(RunOptions, table, "run"), "run", "epochs", "steps"
    )
    options.check()
    return options


def _init_path(path: Any) -> Path | None:
    """Return the path of the initial weights; None stands for random weights."""
    if path is None:
        return None
    if not isinstance(path, str) or not path:
        raise UsageError(f"[model] init: expected a path, seen {files.brief(path)}")
    return Path(path)


def _engine_options(table: Table, wire: Table) -> Any:
    """Return the engine's options; engines with wire options also take the keys of `[wire]`."""
    table = {"kind": "allreduce", **table}
    wire_options = config.read(WireOptions, wire, "wire")
    find_allreduce(wire_options.algorithm)
    misplaced_keys = {option.name for option in fields(WireOptions)} & table.keys()
    if misplaced_keys:
        raise UsageError(f"[engine] {', '.join(sorted(misplaced_keys))}: belongs in [wire]")
    kind = config.pick(engines.ENGINES, table["kind"], "[engine] kind")
    option_names = {option.name for option in fields(kind)}
    for key in table.keys() - option_names - {"kind"}:
        owners = [n for n, cls in engines.ENGINES.items() if key in {f.name for f in fields(cls)}]
        if owners:
            raise UsageError(
                f"[engine] {key}: belongs to {' and '.join(owners)}, seen with {table['kind']}; "
                f"use --engine {owners[0]}, or remove the key"
            )
    wire_options.must_have_defaults(table["kind"], ALLREDUCE_ONLY_DEFAULTS.keys() - option_names)
    keys = {key: value for key, value in wire.items() if key in option_names}
    return config.read_kind(engines.ENGINES, table | keys, "engine")


def _batch_options(table: Table) -> BatchOptions:
    options: BatchOptions = _exactly_one(
        config.read(BatchOptions, table, "optimizer"), "optimizer", *overrides.BATCH_KEYS
    )
    if options.size(1) % options.micro_batches:
        raise UsageError(
            f"[optimizer] micro_batches: expected a divisor of the batch of {options.size(1)}, "
            f"seen {options.micro_batches}"
        )
    if options.batch and options.base_batch:
        raise UsageError(
            "[optimizer] base_batch: expected batch_per_rank beside it, seen batch, which is the "
            "same for any number of ranks, so that there is nothing to scale the rate by"
        )
    return options


def _exactly_one(options: Any, table: str, first: str, second: str) -> Any:
    """Return `options` if exactly one of two keys is given."""
    if (getattr(options, first) is None) == (getattr(options, second) is None):
        raise UsageError(f"[{table}] needs exactly one of {first} and {second}")
    return options
