"""The report of a hung job: ranks that block it, ranks that wait, their lines, the remedy."""

from __future__ import annotations

import faulthandler
from collections.abc import Sequence
from pathlib import Path

from hpctrain.watch.record import REPORT, Call, Snapshot

_WAITING, _SILENT, _COMPUTING = "waiting", "stopped or dead", "alive, computing"
_REMEDY = """what to do: look at the ranks that the job waits for.
  stopped or dead: look on its host for its pid (killed, out of memory?)
  computing: its stack is in stacks-RRRRR.txt; where it is only slow, raise run.timeout_s
  then start again with --resume"""
_MATCH = """what to do: make all ranks call the same operations in the same order.
  where the operations, peers and lines above differ, there it began; then --resume"""


def interval_s(timeout_s: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(1.0, timeout_s / 4)


def report(snapshots: Sequence[Snapshot], now_s: float, timeout_s: float) -> str:
    """Return the report: first the ranks that block the job and wait for none, then the others."""
    judgements = [(s, _judgement(s, now_s, timeout_s)) for s in snapshots]
    missing_ranks = set(range(max((s.size for s in snapshots), default=0))) - {
        s.rank for s in snapshots
    }
    suspects = [_line(s, j, now_s) for s, j in judgements if j.endswith(_SILENT)]
    suspects += [f"  rank {rank}: left no record: see its output" for rank in sorted(missing_ranks)]
    suspects += [_line(s, j, now_s) for s, j in judgements if j.endswith(_COMPUTING)]
    waiting = [_line(s, j, now_s) for s, j in judgements if j == _WAITING]
    lines = [f"hung: a call has waited for longer than {timeout_s:g} s (run.timeout_s)"]
    lines += ["the job waits for:", *suspects] if suspects else []
    lines += ["these wait:" if suspects else "all ranks wait: mismatched calls", *waiting]
    return "\n".join([*lines, _REMEDY if suspects else _MATCH])


def _judgement(s: Snapshot, now_s: float, timeout_s: float) -> str:
    # Heartbeat first: a rank that was stopped inside a call still seems to wait.
    age_s = max(now_s - s.heartbeat, 0.0)
    if age_s > 3 * interval_s(timeout_s):  # a busy core may skip a beat or two
        return f"no heartbeat for {age_s:.0f} s: {_SILENT}"
    return _WAITING if s.waits else f"heartbeat {age_s:.1f} s ago: {_COMPUTING}"


def _line(s: Snapshot, judgement: str, now_s: float) -> str:
    last_call = sorted(s.calls, key=lambda call: call.since)[-1:]
    calls = ", ".join(_call(call, now_s) for call in s.waits or last_call)
    kind = "in" if s.waits else "last operation"
    name = f"  rank {s.rank} on {s.host} (pid {s.pid}), step {s.step}, at {s.line}"
    return f"{name}: {judgement}; {kind} {calls or 'none'}"


def _call(call: Call, now_s: float) -> str:
    peer = "all ranks" if call.peer == -1 else f"rank {call.peer}"
    since = (
        f"begun {max(now_s - call.since, 0.0):.1f} s ago, step {call.step}, thread {call.thread}"
    )
    return f"{call.operation} with {peer}, {call.nbytes} bytes, {since}"


def write_report(directory: Path, text: str) -> bool:
    """Write hung-report.txt; return True on the one rank that wrote it and reports for the job."""
    try:
        with open(directory / REPORT, "x") as stream:
            stream.write(text)
    except OSError as error:
        # On a full disk or a lost folder all ranks report, rather than none.
        return not isinstance(error, FileExistsError)
    return True


def dump_stacks(path: Path) -> None:
    """Write the stacks of all threads of this process to `path`, or to stderr if that fails."""
    try:
        with open(path, "w") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
    except OSError:
        # A full disk must not keep the watch from ending the job.
        faulthandler.dump_traceback(2, all_threads=True)
