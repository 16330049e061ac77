"""The facts of a hung job as data: the contents of hung-report.json."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TypedDict

from hpctrain.watch.layout import Call, Snapshot

WAITING, SILENT, COMPUTING = "waiting", "stopped or dead", "alive, computing"
ENDED = "has ended its script"
_STATES = (WAITING, SILENT, COMPUTING, ENDED)
_LAST_CALLS = 8  #: of each rank


class CallFacts(TypedDict):
    """An operation of a thread; `peer` is None if it involves all ranks, `end` while it lasts."""

    thread: str
    operation: str
    step: int
    peer: int | None
    bytes: int
    start: str
    end: str | None
    waiting: bool


class RankFacts(TypedDict):
    """The state of a rank, and its last operations, the newest last."""

    rank: int
    state: str  #: "waiting", "stopped or dead", "alive, computing", "has ended its script"
    host: str
    pid: int
    step: int
    heartbeat: str
    line: str
    calls: list[CallFacts]


class MissingFacts(TypedDict):
    """A rank without a record; `node` if the records of its whole node are missing."""

    rank: int
    node: str | None


class HungFacts(TypedDict):
    """A hung job; times are UTC in ISO 8601."""

    schema: int
    time: str
    timeout_s: float | None  #: None: ranks wait for others whose script has ended
    blocking: list[int]  #: the ranks that the job waits for; none: mismatched calls
    waiting: list[int]
    ranks: list[RankFacts]
    missing: list[MissingFacts]
    versions: dict[str, str]


def make_facts(
    judgements: Sequence[tuple[Snapshot, str]],
    missing: Sequence[int],
    nodes: Mapping[int, str],
    now_s: float,
    timeout_s: float | None,
) -> HungFacts:
    """Return the facts from each rank's record and the text that judges it.

    `nodes`: those ranks of `missing` whose whole node has left no records, and its name.
    """
    waiting = [snapshot.rank for snapshot, text in judgements if text.endswith(WAITING)]
    blocking = {snapshot.rank for snapshot, _ in judgements} - {*waiting} | {*missing}
    return {
        "schema": 1,
        "time": utc(now_s),
        "timeout_s": timeout_s,
        "blocking": sorted(blocking),
        "waiting": sorted(waiting),
        "ranks": [rank_facts(snapshot, text) for snapshot, text in judgements],
        "missing": [{"rank": rank, "node": nodes.get(rank)} for rank in missing],
        "versions": _versions(),
    }


def rank_facts(snapshot: Snapshot, judgement: str, last: int = _LAST_CALLS) -> RankFacts:
    """Return a rank's facts, with its `last` operations and the operations it waits in."""
    calls = {*snapshot.history[-last:], *snapshot.calls}
    return {
        "rank": snapshot.rank,
        "state": next((state for state in _STATES if judgement.endswith(state)), judgement),
        "host": snapshot.host,
        "pid": snapshot.pid,
        "step": snapshot.step,
        "heartbeat": utc(snapshot.heartbeat),
        "line": snapshot.line,
        "calls": list(map(_call_facts, sorted(calls, key=lambda call: call.start_s))),
    }


def _call_facts(call: Call) -> CallFacts:
    return {
        "thread": call.thread,
        "operation": call.operation,
        "step": call.step,
        "peer": None if call.peer == -1 else call.peer,
        "bytes": call.nbytes,
        "start": utc(call.start_s),
        "end": None if call.end_s is None else utc(call.end_s),
        "waiting": call.is_waiting,
    }


def utc(seconds: float) -> str:
    """Return a wall-clock time as text, also from a record that its rank was writing."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return ""


def _versions() -> dict[str, str]:
    """Return the versions of the packages that this rank has imported, without reading files."""
    modules = {name: sys.modules.get(name) for name in ("hpctrain", "mpi4py", "numpy", "cupy")}
    versions = {name: getattr(module, "__version__", "") for name, module in modules.items()}
    return {"python": platform.python_version()} | {k: v for k, v in versions.items() if v}
