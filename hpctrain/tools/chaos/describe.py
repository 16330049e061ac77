"""Cases and faults in words, as a line of a log and a row of a table have them."""

from __future__ import annotations

from hpctrain.tools.chaos.case import (
    Case,
    FailingFile,
    Fault,
    FullDisk,
    HostFault,
    LinkCall,
    Signal,
)

HOSTS = {"cut": "link cut", "slow": "link slowed", "dead": "host dead"}


def describe_case(case: Case) -> str:
    """Return a case in words: engine, ranks, launcher and faults."""
    spares = f"+{case.spares}" if case.spares else ""
    faults = "; ".join(map(describe_fault, case.faults)) or "no faults"
    return f"{case.engine} x{case.ranks}{spares} {case.launcher}: {faults}"


def describe_fault(fault: Fault) -> str:
    """Return a fault with its moment and its values."""
    if isinstance(fault, Signal):
        return f"{_signal(fault)} {_moment(fault)}"
    if isinstance(fault, HostFault):
        return (
            f"{HOSTS[fault.effect]} of rank {fault.target} at {_step(fault.step, fault.delay_ms)}"
        )
    if isinstance(fault, LinkCall):
        later = f" + {fault.later}" if fault.later else ""
        return f"kill in call {100 * fault.part:.2f} %{later} of rank {_ranks(fault)}"
    if isinstance(fault, FullDisk):
        return f"disk of {fault.kib} KiB"
    rank = "each rank" if fault.rank < 0 else f"rank {fault.rank}"
    stays = " and later ones" * fault.stays
    return f"{fault.effect} at {fault.operation} {fault.number} of {rank}{stays}"


def describe_kind(fault: Fault) -> str:
    """Return a fault in words, without its values: a row of the table of verdicts."""
    if isinstance(fault, Signal):
        target = "launcher" if fault.target < 0 else _victims(fault)
        moment = "start" if fault.step is None and fault.during == "step" else fault.during
        return f"{fault.signal} to {target} at {moment}"
    if isinstance(fault, HostFault):
        return HOSTS[fault.effect]
    if isinstance(fault, LinkCall):
        return f"kill of {_victims(fault)} in a call" + " during recovery" * bool(fault.later)
    if isinstance(fault, FailingFile):
        return f"file: {fault.effect} at {fault.operation}"
    return "full disk"


def _signal(fault: Signal) -> str:
    times = f" {fault.times} times" if fault.times > 1 else ""
    if fault.target < 0:
        return f"{fault.signal}{times} to the launcher"
    return f"{fault.signal}{times} to rank {_ranks(fault)}"


def _victims(fault: Signal | LinkCall) -> str:
    return f"{1 + len(fault.others)} ranks" if fault.others else "rank"


def _ranks(fault: Signal | LinkCall) -> str:
    first = fault.target if isinstance(fault, Signal) else fault.rank
    return " and ".join(map(str, (first, *fault.others)))


def _moment(fault: Signal) -> str:
    step = _step(fault.step, fault.delay_ms)
    if fault.during == "recovery":
        return f"{fault.delay_ms:g} ms into the recovery"
    return f"during a checkpoint after {step}" if fault.during == "checkpoint" else f"at {step}"


def _step(step: int | None, delay_ms: float) -> str:
    moment = "the start" if step is None else f"step {step}"
    return f"{moment} + {delay_ms:g} ms"
