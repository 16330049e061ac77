"""The report of a hung job: ranks that block it, ranks that wait, their lines, the remedy."""

from __future__ import annotations

import faulthandler
from collections.abc import Sequence
from pathlib import Path

from hpctrain.watch.record import REPORT_NAME, Call, Snapshot

_WAITING, _SILENT, _COMPUTING = "waiting", "stopped or dead", "alive, computing"
_ENDED = "has ended its script"
_BLOCKED_REMEDY = """what to do: look at the ranks that the job waits for.
  stopped or dead: look on its host for its pid (killed, out of memory?)
  computing: its stack is in stacks-RRRRR.txt; where it is only slow, raise run.timeout_s
  then start again with --resume"""
#: Of a program that is no run of a recipe: it has no folder.
_SCRIPT_REMEDY = """what to do: look at the ranks that the job waits for.
  stopped or dead: look on its host for its pid (killed, out of memory?)
  computing: `py-spy dump --pid PID` shows its stack; where it is only slow, raise the time limit"""
_MATCH_REMEDY = """what to do: make all ranks call the same operations in the same order.
  where the operations, peers and lines above differ, there it began; then --resume"""


def interval_s(timeout_s: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(1.0, timeout_s / 4)


def make_report(
    snapshots: Sequence[Snapshot], now_s: float, timeout_s: float, has_folder: bool = True
) -> str:
    """Return the report: first the ranks that block the job and wait for none, then the others.

    `has_folder`: whether a run's folder holds stacks and checkpoints.
    """
    judgements = [(snapshot, _judge_rank(snapshot, now_s, timeout_s)) for snapshot in snapshots]

    def describe(judgement: str) -> list[str]:
        return [
            _describe_rank(snapshot, judged, now_s, has_folder)
            for snapshot, judged in judgements
            if judged.endswith(judgement)
        ]

    missing_ranks = set(range(max((s.size for s in snapshots), default=0))) - {
        s.rank for s in snapshots
    }
    blocking_ranks = [
        *describe(_SILENT),
        *(f"  rank {rank}: left no record: see its output" for rank in sorted(missing_ranks)),
        *describe(_ENDED),
        *describe(_COMPUTING),
    ]
    limit_name = " (run.timeout_s)" * has_folder
    lines = [f"hung: a call has waited for longer than {timeout_s:g} s{limit_name}"]
    lines += ["the job waits for:", *blocking_ranks] if blocking_ranks else []
    lines += [
        "these wait:" if blocking_ranks else "all ranks wait: mismatched calls",
        *describe(_WAITING),
    ]
    blocked_remedy = _BLOCKED_REMEDY if has_folder else _SCRIPT_REMEDY
    match_remedy = _MATCH_REMEDY if has_folder else _MATCH_REMEDY.replace("; then --resume", "")
    return "\n".join([*lines, blocked_remedy if blocking_ranks else match_remedy])


def _judge_rank(snapshot: Snapshot, now_s: float, timeout_s: float) -> str:
    # Heartbeat first: a rank that was stopped inside a call still seems to wait.
    age_s = max(now_s - snapshot.heartbeat, 0.0)
    if age_s > 3 * interval_s(timeout_s):  # a busy core may skip a beat or two
        return f"no heartbeat for {age_s:.0f} s: {_SILENT}"
    if snapshot.has_ended:
        return _ENDED
    return _WAITING if snapshot.waiting_calls else f"heartbeat {age_s:.1f} s ago: {_COMPUTING}"


def _describe_rank(snapshot: Snapshot, judgement: str, now_s: float, has_steps: bool) -> str:
    place = f"  rank {snapshot.rank} on {snapshot.host} (pid {snapshot.pid})"
    if judgement == _ENDED:
        return f"{place}: {judgement}"
    place += f", step {snapshot.step}" * has_steps
    last_call = sorted(snapshot.calls, key=lambda call: call.start_s)[-1:]
    calls = ", ".join(
        _describe_call(call, now_s, has_steps) for call in snapshot.waiting_calls or last_call
    )
    call_kind = "in" if snapshot.waiting_calls else "last operation"
    return f"{place}, at {snapshot.line}: {judgement}; {call_kind} {calls or 'none'}"


def _describe_call(call: Call, now_s: float, has_steps: bool) -> str:
    peer = "all ranks" if call.peer == -1 else f"rank {call.peer}"
    timing = f"begun {max(now_s - call.start_s, 0.0):.1f} s ago"
    timing += f", step {call.step}" * has_steps + f", thread {call.thread}"
    return f"{call.operation} with {peer}, {call.nbytes} bytes, {timing}"


def make_ended_report(ended: Sequence[Snapshot], waiting: Sequence[Snapshot], now_s: float) -> str:
    """Return the report of ranks that wait for others whose script has ended."""
    names = ", ".join(f"rank {snapshot.rank}" for snapshot in ended)
    first = waiting[0]
    call = min(first.waiting_calls, key=lambda call: call.start_s)
    line = first.line.split()[0]
    return "\n".join(
        [
            f"hung: {names} {_ENDED}, rank {first.rank} waits in {call.operation} ({line}): do "
            "ranks have different numbers of batches?",
            *(_describe_rank(s, _ENDED, now_s, has_steps=False) for s in ended),
            *(_describe_rank(s, _WAITING, now_s, has_steps=False) for s in waiting),
            "what to do: make all ranks call the same operations in the same order",
        ]
    )


def write_report(directory: Path, text: str) -> bool:
    """Write hung-report.txt; return True on the one rank that wrote it and reports for the job."""
    try:
        with open(directory / REPORT_NAME, "x") as stream:
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
