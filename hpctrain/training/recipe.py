"""Recipes: a whole run as tables of options, read from TOML and checked before anything starts.

Each table is read by the package that it configures; here they are only joined.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field

from hpctrain import config, data, engines, nn, optim
from hpctrain.collectives.direct import must_be_one_node
from hpctrain.config import overrides, toml, usercode
from hpctrain.config.usercode import Code
from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.metrics import Metric
from hpctrain.gradients.precision import Precision
from hpctrain.gradients.reducer import ALLREDUCE_ONLY_DEFAULTS, WireOptions
from hpctrain.training.callbacks import EarlyStop
from hpctrain.training.faults import FaultsOptions
from hpctrain.tuning.select import allreduce_named
from hpctrain.watch.trace import TraceOptions

Positive = Annotated[int, Field(ge=1)]
Table = dict[str, Any]


def _file_name(name: str) -> str:
    """Return a run's name if it is safe in a folder's name and on a terminal."""
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise ValueError("expected a name without '/', control characters and a dot in front")
    return name


NotFinite = Literal["stop", "skip"]


def most_skipped(not_finite: NotFinite, max_skipped: int | None) -> int:
    """Return the limit of skipped steps in a row; raise UsageError for a number beside "stop".

    Without a number it is 0 for "stop" and 10 for "skip".
    """
    if not_finite == "skip":
        return 10 if max_skipped is None else max_skipped
    if max_skipped is not None:
        raise UsageError(
            f"[run] max_skipped: expected not_finite = 'skip' beside it, seen '{not_finite}'"
        )
    return 0


@config.options
class RunOptions:
    """`[run]`: exactly one of `epochs` and `steps`."""

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_file_name)]
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    epochs: Positive | None = None
    steps: Positive | None = None
    interval_steps: Positive | None = None  #: steps per row of metrics; an epoch if not set
    epoch_samples: Positive | None = None  #: the training set is repeated, or cut, to this number
    evaluate_epochs: Positive | None = None  #: epochs from one evaluation to the next; 1 if
    evaluate_steps: Positive | None = None  #: neither is given
    callbacks: list[str] = field(default_factory=list)  #: "module:function"s, given each row
    device: Literal["auto", "cpu", "gpu"] = "auto"
    precision: Precision = "float32"
    prefetch: Annotated[int, Field(ge=0)] | None = None  #: batches that a thread reads ahead
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    not_finite: NotFinite = "stop"  #: treatment of a step with a gradient that is not finite
    max_skipped: Positive | None = None  #: steps in a row that may be skipped; 10 if not given


@config.options
class BatchOptions:
    """Samples per step: of all ranks together (strong scaling), or per rank (weak scaling).

    A rank's share is computed in `micro_batches` pieces, which need less memory. `base_batch`, for
    weak scaling alone, is the batch for which the recipe's rate was tuned.
    """

    batch: Positive | None = None
    batch_per_rank: Positive | None = None
    base_batch: Positive | None = None
    micro_batches: Positive = 1

    def size(self, ranks: int) -> int:
        """Return the samples of one step over all ranks."""
        return self.batch or (self.batch_per_rank or 0) * ranks

    def rate_factor(self, ranks: int) -> float:
        """Return the factor of the rate: k for a batch of k times `base_batch`.

        Source: the linear scaling rule of Goyal et al. (2017, section 2.1).
        """
        return self.size(ranks) / self.base_batch if self.base_batch else 1.0


@config.options
class CheckpointOptions:
    """`[checkpoint]`: when to save, and how many to keep; one is always made at the end."""

    every_epochs: Positive | None = None
    every_steps: Positive | None = None
    keep: Positive | None = 3
    keep_best: Metric | None = None  #: the best by this metric is saved at once, and stays


@dataclass(frozen=True)
class Recipe:
    """A run, checked; `tables` is the recipe as read, to be written beside the results."""

    run: RunOptions
    model: Any
    data: Any
    batch: BatchOptions
    optimizer: Any
    schedule: Any
    engine: Any
    checkpoint: CheckpointOptions
    faults: FaultsOptions
    early_stop: EarlyStop | None
    trace: TraceOptions
    init: Path | None
    code: Code
    tables: Table

    def toml(self) -> str:
        """Return the resolved recipe as TOML; training it again repeats the run."""
        return tomli_w.dumps(self.tables)

    def must_fit(self, ranks: int, nodes: int = 1) -> None:
        """Raise UsageError if `ranks` on `nodes` nodes cannot train this, whatever the data.

        Engine, algorithm, batch and planted faults each constrain the number of ranks.
        """
        workers = engines.workers_of(self.engine, ranks)
        engines.must_fit(self.engine, ranks, self.batch.size(workers))
        self.faults.check(ranks, workers)
        if getattr(self.engine, "algorithm", "auto") == "direct":
            must_be_one_node(nodes)

    @property
    def sha256(self) -> str:
        """Return the hash of the resolved recipe."""
        return hashlib.sha256(self.toml().encode()).hexdigest()


def load(name: str, settings: Iterable[str] = ()) -> Recipe:
    """Return the built-in recipe `name`, or the one in file `name`, changed by `table.key=value`s.

    The last setting of a key counts, and removes an excluded key from the file. Raises UsageError
    with every fault of a table, and the nearest name.
    """
    folder = Path(name).parent if _is_file(name) else "."
    return check(overrides.apply(read_tables(name), settings), folder)


def built_in() -> list[str]:
    """Return the names of the recipes that come with the package."""
    files = resources.files("hpctrain.training.recipes").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def read_tables(name: str) -> Table:
    """Return the tables of a recipe as written in its file."""
    return toml.parse(_source(name), f"recipe {name}")


def check(tables: Mapping[str, Any], folder: str | Path = ".") -> Recipe:
    """Return the recipe that `tables` spell out; modules that it names lie in `folder`.

    If [code] names a folder, that counts: the recipe is then of an earlier run.
    """
    toml.must_be_plain(tables, "recipe")
    tables = dict(tables)
    if tables.pop("schema", None) != 1:
        raise UsageError("a recipe begins with 'schema = 1', the format that this version reads")
    for name, table in tables.items():
        config.pick(dict.fromkeys(overrides.TABLES), name, "table")
        overrides.must_be_table(name, table)
    at = {name: dict(tables.get(name, {})) for name in overrides.TABLES}
    keys = [option.name for option in fields(BatchOptions)]
    batch = {key: at["optimizer"].pop(key) for key in keys if key in at["optimizer"]}
    init = _init(at["model"].pop("init", None))
    if init is not None:  # the resolved recipe is to repeat the run wherever it is read
        tables["model"] = {**tables["model"], "init": str(init)}
    run = _run(at["run"])
    code = usercode.read(at, run.callbacks, str(folder))
    tables.pop("code", None)
    tables |= code.tables()
    return Recipe(
        run=run,
        model=nn.read(at["model"], code.folder),
        data=data.read(at["data"], code.folder),
        batch=_batch(batch),
        optimizer=_optimizer(at["optimizer"]),
        schedule=config.read_kind(
            optim.SCHEDULES, {"kind": "constant", **at["schedule"]}, "schedule"
        ),
        engine=_engine(at["engine"], at["wire"]),
        checkpoint=config.read(CheckpointOptions, at["checkpoint"], "checkpoint"),
        faults=config.read(FaultsOptions, at["faults"], "faults"),
        early_stop=(
            config.read(EarlyStop, at["early_stop"], "early_stop")
            if "early_stop" in tables
            else None
        ),
        trace=config.read(TraceOptions, at["trace"], "trace"),
        init=init,
        code=code,
        tables={"schema": 1, **tables},
    )


def _is_file(name: str) -> bool:
    return name.endswith(".toml") or "/" in name


def _source(name: str) -> str:
    if _is_file(name):
        return files.read_text(name, toml.LIMIT_BYTES)
    if name not in built_in():
        raise UsageError(config.unknown("recipe", name, built_in()) + " (or name a .toml file)")
    return resources.files("hpctrain.training.recipes").joinpath(f"{name}.toml").read_text()


def _run(table: Table) -> RunOptions:
    options: RunOptions = _exactly_one(
        config.read(RunOptions, table, "run"), "run", "epochs", "steps"
    )
    if options.evaluate_epochs and options.evaluate_steps:
        raise UsageError("[run] takes evaluate_epochs or evaluate_steps, not both")
    most_skipped(options.not_finite, options.max_skipped)
    return options


def _init(path: Any) -> Path | None:
    """Return the absolute path of the weights to begin with, None for none."""
    if path is None:
        return None
    if not isinstance(path, str) or not path:
        raise UsageError(f"[model] init: expected a path, seen {files.brief(path)}")
    return Path(path).absolute()


def _optimizer(table: Table) -> Any:
    options = config.read_kind(optim.OPTIMIZERS, table, "optimizer")
    try:
        options.build(options.rate)  # which checks options against each other
    except UsageError as error:
        raise UsageError(f"[optimizer] {error}") from None
    return options


def _engine(table: Table, wire: Table) -> Any:
    """Return the engine's options; engines with wire options also take the keys of `[wire]`."""
    table = {"kind": "allreduce", **table}
    wire_options = config.read(WireOptions, wire, "wire")
    allreduce_named(wire_options.algorithm)
    misplaced = {option.name for option in fields(WireOptions)} & table.keys()
    if misplaced:
        raise UsageError(f"[engine] {', '.join(sorted(misplaced))}: belongs in [wire]")
    kind = config.pick(engines.ENGINES, table["kind"], "[engine] kind")
    _must_belong(table, kind)
    options = {option.name for option in fields(kind)}
    wire_options.must_have_defaults(table["kind"], ALLREDUCE_ONLY_DEFAULTS.keys() - options)
    keys = {key: value for key, value in wire.items() if key in options}
    return config.read_kind(engines.ENGINES, table | keys, "engine")


def _must_belong(table: Table, kind: Any) -> None:
    """Raise UsageError for a key of another regime than the `kind` of the table."""
    options = {"kind"} | {option.name for option in fields(kind)}
    for key in table.keys() - options:
        owners = [n for n, cls in engines.ENGINES.items() if key in {f.name for f in fields(cls)}]
        if owners:
            raise UsageError(
                f"[engine] {key}: belongs to {' and '.join(owners)}, seen with {table['kind']}; "
                f"use --engine {owners[0]}, or remove the key"
            )


def _batch(table: Table) -> BatchOptions:
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
