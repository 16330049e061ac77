"""Cases of a campaign: their format, a line of JSON each, and their generation from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Table = dict[str, Any]
LIMIT_S = 90.0  # of an attempt; a hang is one that takes longer, though cores are shared
HANG_S = 3.0  # [run] timeout_s where a rank is stopped for good


@dataclass(frozen=True)
class Signal:
    """A signal to rank `target`, or to the launcher (-1), `times` times.

    It is sent `delay_ms` after every rank began `step`, or without a step after the start.
    """

    signal: str
    target: int
    step: int | None
    delay_ms: float
    times: int = 1
    kind: Literal["signal"] = "signal"


@dataclass(frozen=True)
class FullDisk:
    """The run's folder lies on a file system of `kib` KiB, which is enlarged afterwards."""

    kib: int
    kind: Literal["disk"] = "disk"


@dataclass(frozen=True)
class FailingFile:
    """The `number`-th `operation` of `rank` (-1: of each) on files of the run; see failing.c."""

    rank: int
    operation: str
    number: int
    effect: str
    stays: bool
    kind: Literal["file"] = "file"


Fault = Signal | FullDisk | FailingFile
KINDS: dict[str, Any] = {"signal": Signal, "disk": FullDisk, "file": FailingFile}


@dataclass(frozen=True)
class Case:
    """One training job and its faults; `recipe` holds all tables but `[data]`."""

    seed: int
    index: int
    ranks: int
    engine: str
    recipe: Table
    launcher: Literal["launch", "mpiexec"]
    faults: list[Fault] = field(default_factory=list)

    @property
    def synchronous(self) -> bool:
        """Whether the parameters at the end are promised to be those of an undisturbed run."""
        return ENGINES[self.engine].synchronous


def dump(case: Case) -> Table:
    """Return the case as JSON data."""
    return asdict(case)


def parse(table: Table) -> Case:
    """Return the case that `dump` made `table` of."""
    faults = [KINDS[fault["kind"]](**fault) for fault in table["faults"]]
    return Case(**{**table, "faults": faults})


def read(line: str) -> Case:
    """Return the case of a line: of a campaign's file, or of its results."""
    table = json.loads(line)
    return parse(table.get("case", table))


@dataclass(frozen=True)
class Regime:
    """A row of the table of engines: recipe tables, the ranks they take, what is promised."""

    tables: Table
    smallest: int = 2
    largest: int = 4
    synchronous: bool = True


def _regime(kind: str, smallest: int = 2, asynchronous: bool = False, **keys: Any) -> Regime:
    wire = {key: keys.pop(key) for key in list(keys) if key in WIRE}
    tables = {"engine": {"kind": kind, **keys}} | ({"wire": wire} if wire else {})
    return Regime(tables, smallest, 1 if kind == "single" else 4, not asynchronous)


WIRE = {"algorithm", "bucket_bytes", "overlap", "priority", "compression", "compression_ratio",
        "compression_rank", "reduction", "blocks"}  # fmt: skip
ENGINES = {
    "single": _regime("single", 1),
    "allreduce": _regime("allreduce"),
    "ring": _regime("allreduce", algorithm="ring"),
    "tree": _regime("allreduce", algorithm="tree"),
    "recursive-doubling": _regime("allreduce", algorithm="recursive-doubling"),
    "halving-doubling": _regime("allreduce", algorithm="halving-doubling"),
    "direct": _regime("allreduce", algorithm="direct"),
    "buckets": _regime("allreduce", algorithm="ring", bucket_bytes=1024, overlap="always"),
    "priority": _regime("allreduce", bucket_bytes=1024, overlap="always", priority=True),
    "shards": _regime("allreduce", shard_optimizer=True),
    "shared": _regime("allreduce", share_parameters=True),
    "ordered": _regime("allreduce", reduction="ordered"),
    "bf16": _regime("allreduce", compression="bf16"),
    "top-k": _regime("allreduce", compression="top-k", compression_ratio=0.1),
    "powersgd": _regime("allreduce", compression="powersgd", compression_rank=2),
    "ps-sync": _regime("ps-sync"),
    "ps-sync, two servers": _regime("ps-sync", 3, servers=2),
    "ps-sync, colocated": _regime("ps-sync", servers=2, placement="colocated"),
    "local-sgd": _regime("local-sgd", period=4),
    "local-sgd, averaged": _regime("local-sgd", period=6, momentum="averaged", start_after=10),
    "local-sgd, outer": _regime("local-sgd", period=5, outer="nesterov"),
    "local-sgd, delayed": _regime("local-sgd", period=6, delay=2),
    "gossip, ring": _regime("gossip", graph="ring"),
    "gossip, exponential": _regime("gossip", graph="exponential"),
    "ps-sync, backup": _regime("ps-sync", 3, True, backup_workers=1),
    "ps-async": _regime("ps-async", 2, True),
    "ps-async, bounded": _regime("ps-async", 3, True, staleness=1),
    "ps-async, softsync": _regime("ps-async", 3, True, softsync=1),
    "ps-async, compensated": _regime("ps-async", 3, True, delay_compensation=0.1, servers=2),
    "ps-async, colocated": _regime("ps-async", 2, True, servers=2, placement="colocated"),
    "ps-async, seldom": _regime("ps-async", 3, True, push_every=2, pull_every=4),
    "easgd": _regime("easgd", 2, True, period=4),
    "easgd, two servers": _regime("easgd", 4, True, period=3, servers=2),
    "gossip": _regime("gossip", 2, True),
}  # fmt: skip

# Optimizers and periods: of few kinds, since each needs a run that is not hurt to compare with.
SETTINGS: list[Table] = [
    {
        "run": {"steps": 80, "interval_steps": 7},
        "optimizer": {"kind": "sgd", "rate": 0.05, "momentum": 0.9, "batch": 32},
        "checkpoint": {"every_steps": 15, "keep": 3},
    },
    {
        "run": {"steps": 70, "interval_steps": 10},
        "optimizer": {"kind": "adamw", "rate": 0.005, "batch": 32},
        "checkpoint": {"every_steps": 9, "keep": 2, "keep_best": "test_loss"},
    },
]
PLAIN_SGD = {"ps-async, compensated", "ps-async, seldom"}  # take no momentum
SAMPLES, BATCH = 390, 32  # 13 steps per epoch, the last of 6 samples
STEP_MS = 4.0
# Where the launcher is killed, steps are so long that ranks which train on are seen doing so.
ORPHAN_MS, ORPHAN_STEPS = 200.0, 15

# How often rank 0, and how often any other, does what to files of such a run, about.
OPERATIONS = {
    0: {"any": 130, "open": 25, "write": 25, "fsync": 35, "rename": 15, "unlink": 20, "mkdir": 15,
        "read": 60, "truncate": 1},
    1: {"any": 24, "open": 8, "write": 8, "fsync": 8, "rename": 1, "read": 30, "unlink": 1},
}  # fmt: skip
ERRORS = ["ENOSPC", "EIO", "EROFS", "EDQUOT"]


def generate(seed: int, index: int) -> Case:
    """Return case `index` of the campaign of `seed`: a function of both and nothing else."""
    names = list(ENGINES)
    random.Random(f"{seed} round {index // len(names)}").shuffle(names)
    engine = names[index % len(names)]  # each as often as any other
    draw = random.Random(f"{seed} case {index}")
    regime = ENGINES[engine]
    ranks = draw.randint(regime.smallest, regime.largest)
    faults = [_fault(draw, ranks) for _ in range(draw.choice([1, 1, 1, 2]))]
    recipe = _recipe(draw, engine, faults)
    launcher = draw.choice(["launch", "launch", "launch", "mpiexec"])
    return Case(seed, index, ranks, engine, recipe, launcher, faults)


def orphans(fault: Fault) -> bool:
    """Return whether the ranks of the job lose their launcher."""
    return isinstance(fault, Signal) and (fault.target, fault.signal) == (-1, "SIGKILL")


def _recipe(draw: random.Random, engine: str, faults: list[Fault]) -> Table:
    settings = SETTINGS[0 if engine in PLAIN_SGD else draw.randrange(len(SETTINGS))]
    stops = any(isinstance(fault, Signal) and fault.signal == "SIGSTOP" for fault in faults)
    run = {"name": "campaign", **settings["run"], **({"timeout_s": HANG_S} if stops else {})}
    tables = {"schema": 1, **settings, **ENGINES[engine].tables, "run": run}
    tables["model"] = {"kind": "mlp", "widths": [64, 16, 10]}
    tables["faults"] = {"step_ms": STEP_MS}
    if engine in PLAIN_SGD:
        tables["optimizer"] = {**settings["optimizer"], "momentum": 0.0}
    return tables


def _fault(draw: random.Random, ranks: int) -> Fault:
    make = draw.choices([_to_rank, _to_launcher, _disk, _file], [35, 20, 12, 33])[0]
    return make(draw, ranks)


def _to_rank(draw: random.Random, ranks: int) -> Signal:
    number = draw.choice(["SIGKILL", "SIGKILL", "SIGKILL", "SIGUSR1", "SIGTERM", "SIGSTOP"])
    if (number, ranks) == ("SIGSTOP", 1):
        number = "SIGTERM"  # it is other ranks that see it
    step = draw.choice([1, *[draw.randint(2, 66)] * 4, 69])
    return Signal(number, draw.randrange(ranks), step, round(draw.uniform(0, 12), 1))


def _to_launcher(draw: random.Random, ranks: int) -> Signal:
    number = draw.choice(["SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1"])
    times = 2 if number == "SIGINT" and draw.random() < 0.5 else 1
    if draw.random() < 0.3:  # at any time, most of which is the start
        return Signal(number, -1, None, round(draw.uniform(50, 4000)), times)
    last = ORPHAN_STEPS if number == "SIGKILL" else 69
    return Signal(number, -1, draw.randint(1, last), round(draw.uniform(0, 12), 1), times)


def _disk(draw: random.Random, ranks: int) -> FullDisk:
    return FullDisk(4 * draw.randint(4, 60))


def _file(draw: random.Random, ranks: int) -> FailingFile:
    rank = draw.choice([0, 0, 0, -1, ranks - 1])
    counts = OPERATIONS[0 if rank < 1 else 1]
    operation = draw.choice(["any", "any", *counts])
    number = draw.randint(1, counts[operation])
    effects = [*ERRORS, "kill", "kill", "after"]
    if operation == "read":
        effects = ["EIO"]
    if operation == "write":
        effects += ["short", "torn", "torn"]
    effect = draw.choice(effects)
    stays = effect not in ("kill", "after", "torn", "EIO") and draw.random() < 0.5
    return FailingFile(rank, operation, number, effect, stays)
