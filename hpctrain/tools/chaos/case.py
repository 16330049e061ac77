"""Cases of a campaign and their faults: a line of JSON each, and the same in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief

Table = dict[str, Any]
Launcher = Literal["launch", "mpiexec", "elastic", "threads", "netlab", "srun"]
Moment = Literal["step", "checkpoint", "recovery"]
LIMIT_S = 90.0  #: of an attempt; a hang is one that takes longer, though cores are shared
SAMPLES, BATCH = 390, 32  #: of built-in recipes: 13 steps per epoch, the last of 6 samples
HOSTS = {"cut": "link cut", "slow": "link slowed", "dead": "host dead"}


@dataclass(frozen=True)
class Signal:
    """A signal to rank `target`, or to the launcher (-1), `times` times.

    It is sent `delay_ms` after its moment: every rank has begun `step` (None: the job is started);
    `during` a checkpoint, the first one that is written after that; or during a recovery: the fault
    before it has fired (elastic), or the resumed job is starting. `others` are hit at once with it.
    """

    signal: str
    target: int
    step: int | None
    delay_ms: float
    times: int = 1
    others: list[int] = field(default_factory=list)
    during: Moment = "step"
    kind: Literal["signal"] = "signal"

    @property
    def is_orphaning(self) -> bool:
        """Whether the ranks of the job lose their launcher."""
        return (self.target, self.signal) == (-1, "SIGKILL")


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

    @property
    def is_fatal(self) -> bool:
        """Whether the process is killed at this operation."""
        return self.effect in ("kill", "after", "torn")


@dataclass(frozen=True)
class HostFault:
    """A fault of the host of rank `target` on a netlab, `delay_ms` after all began `step`.

    cut: its link carries nothing; slow: 1 Mbit/s; dead: cut, and all its processes are killed.
    """

    effect: Literal["cut", "slow", "dead"]
    target: int
    step: int
    delay_ms: float
    kind: Literal["host"] = "host"


@dataclass(frozen=True)
class LinkCall:
    """Rank `rank`, a thread, is killed in a call of its Link; `others` in the same call.

    `part`, in [0, 1), of the calls of the run without faults, and `later` calls after that.
    """

    rank: int
    part: float
    later: int = 0
    others: list[int] = field(default_factory=list)
    kind: Literal["call"] = "call"


Fault = Signal | FullDisk | FailingFile | HostFault | LinkCall
KINDS: dict[str, Any] = {
    "signal": Signal, "disk": FullDisk, "file": FailingFile, "host": HostFault, "call": LinkCall,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One training job and its faults.

    A `recipe` without `[data]` gets samples that a small network can learn.
    """

    seed: int
    index: int
    ranks: int
    engine: str  #: a name of regimes.py, or a user's recipe
    recipe: Table
    launcher: Launcher
    faults: list[Fault] = field(default_factory=list)
    spares: int = 0
    options: list[str] = field(default_factory=list)  #: of the launcher
    epoch_samples: int = SAMPLES
    batch: int = BATCH
    limit_s: float = LIMIT_S

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on without its lost ranks."""
        return self.launcher in ("elastic", "threads")

    @property
    def attempts(self) -> list[list[Fault]]:
        """The faults of each attempt that has any."""
        return [self.faults] if self.is_elastic else [[fault] for fault in self.faults]

    @property
    def job_ranks(self) -> int:
        """The ranks of the job, spares included."""
        return self.ranks + self.spares

    @property
    def steps(self) -> int:
        """The steps of the whole run."""
        return int(self.recipe["run"]["steps"])

    def samples_of(self, step: int) -> int:
        """Return the samples of the first `step` steps; the last batch of an epoch is short."""
        epochs, steps = divmod(step, -(-self.epoch_samples // self.batch))
        return epochs * self.epoch_samples + min(steps * self.batch, self.epoch_samples)


def parse(table: Mapping[str, Any]) -> Case:
    """Return the case that `asdict` made `table` of; raise ValueError for any other table."""
    try:
        faults = [KINDS[fault["kind"]](**fault) for fault in table["faults"]]
        case = Case(**{**table, "faults": faults})
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a case, seen {brief(table)} ({error})") from None
    if case.launcher not in get_args(Launcher):
        raise ValueError(f"expected a launcher of {get_args(Launcher)}, seen {case.launcher}")
    return case


def read(line: str) -> Case:
    """Return the case of a line: of a campaign's file, or of its results."""
    table = json.loads(line)
    try:
        return parse(table.get("case", table))
    except ValueError as error:
        raise UsageError(str(error)) from None


def describe_case(case: Case) -> str:
    """Describe a case: engine, ranks, launcher and faults."""
    spares_text = f"+{case.spares}" if case.spares else ""
    fault_texts = "; ".join(map(describe_fault, case.faults)) or "no faults"
    return f"{case.engine} x{case.ranks}{spares_text} {case.launcher}: {fault_texts}"


def describe_fault(fault: Fault) -> str:
    """Return a fault with its moment and its values."""
    if isinstance(fault, Signal):
        return f"{_describe_signal(fault)} {_describe_moment(fault)}"
    if isinstance(fault, HostFault):
        return (
            f"{HOSTS[fault.effect]} of rank {fault.target} at "
            f"{_describe_step(fault.step, fault.delay_ms)}"
        )
    if isinstance(fault, LinkCall):
        later_text = f" + {fault.later}" if fault.later else ""
        return f"kill in call {100 * fault.part:.2f} %{later_text} of rank {_describe_ranks(fault)}"
    if isinstance(fault, FullDisk):
        return f"disk of {fault.kib} KiB"
    rank = "each rank" if fault.rank < 0 else f"rank {fault.rank}"
    stays_text = " and later ones" * fault.stays
    return f"{fault.effect} at {fault.operation} {fault.number} of {rank}{stays_text}"


def describe_kind(fault: Fault) -> str:
    """Describe a fault without its values, as a row of the table of verdicts."""
    if isinstance(fault, Signal):
        target = "launcher" if fault.target < 0 else _describe_victims(fault)
        moment = "start" if fault.step is None and fault.during == "step" else fault.during
        return f"{fault.signal} to {target} at {moment}"
    if isinstance(fault, HostFault):
        return HOSTS[fault.effect]
    if isinstance(fault, LinkCall):
        return (
            f"kill of {_describe_victims(fault)} in a call{' during recovery' * bool(fault.later)}"
        )
    if isinstance(fault, FailingFile):
        return f"file: {fault.effect} at {fault.operation}"
    return "full disk"


def _describe_signal(fault: Signal) -> str:
    times_text = f" {fault.times} times" if fault.times > 1 else ""
    if fault.target < 0:
        return f"{fault.signal}{times_text} to the launcher"
    return f"{fault.signal}{times_text} to rank {_describe_ranks(fault)}"


def _describe_victims(fault: Signal | LinkCall) -> str:
    return f"{1 + len(fault.others)} ranks" if fault.others else "rank"


def _describe_ranks(fault: Signal | LinkCall) -> str:
    first_rank = fault.target if isinstance(fault, Signal) else fault.rank
    return " and ".join(map(str, (first_rank, *fault.others)))


def _describe_moment(fault: Signal) -> str:
    step = _describe_step(fault.step, fault.delay_ms)
    if fault.during == "recovery":
        return f"{fault.delay_ms:g} ms into the recovery"
    return f"during a checkpoint after {step}" if fault.during == "checkpoint" else f"at {step}"


def _describe_step(step: int | None, delay_ms: float) -> str:
    moment = "the start" if step is None else f"step {step}"
    return f"{moment} + {delay_ms:g} ms"
