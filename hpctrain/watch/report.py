"""The report of a hung job: ranks that block it, ranks that wait, their lines, the remedy."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from hpctrain.core import atomic, opening
from hpctrain.watch.hung_facts import COMPUTING, ENDED, SILENT, WAITING, HungFacts, make_facts
from hpctrain.watch.layout import Call, Snapshot
from hpctrain.watch.node_file import FACTS_NAME, LEVELS, REPORT_NAME
from hpctrain.watch.roll_call import NO_RECORD, make_roll_call

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

#: The states of ranks that do not wait, in words of the last sentence.
_STATES = {SILENT: SILENT, ENDED: ENDED, COMPUTING: f"{COMPUTING}, perhaps only slow"}


def interval_s(timeout_s: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(1.0, timeout_s / 4)


@dataclass(frozen=True)
class HungReport:
    """The report of a hung job: as text, and the same facts as data."""

    text: str
    facts: HungFacts


def make_report(
    snapshots: Sequence[Snapshot],
    now_s: float,
    timeout_s: float,
    has_folder: bool = True,
    lost_nodes: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> HungReport:
    """Return the report: first the ranks that block the job without waiting, then the waiting ones.

    `has_folder`: whether a run's folder holds stacks and checkpoints. `lost_nodes`: nodes whose
    records did not arrive, and their ranks.
    """
    judgements = [(snapshot, judge_rank(snapshot, now_s, timeout_s)) for snapshot in snapshots]

    def describe(judgement: str) -> list[str]:
        return [
            _describe_rank(snapshot, judged, now_s, has_folder)
            for snapshot, judged in judgements
            if judged.endswith(judgement)
        ]

    missing = missing_ranks(snapshots)
    nodes = {rank: name for name, ranks in lost_nodes.items() for rank in ranks}
    blocking_ranks = [
        *describe(SILENT),
        *(_describe_missing(rank, nodes.get(rank)) for rank in missing),
        *describe(ENDED),
        *describe(COMPUTING),
    ]
    limit_name = " (run.timeout_s)" * has_folder
    lines = [f"hung: a call has waited for longer than {timeout_s:g} s{limit_name}"]
    lines += ["the job waits for:", *blocking_ranks] if blocking_ranks else []
    lines += [
        "these wait:" if blocking_ranks else "all ranks wait: mismatched calls",
        *describe(WAITING),
    ]
    lines += [remedy(bool(blocking_ranks), has_folder), _call_roll(judgements, missing)]
    facts = make_facts(judgements, missing, nodes, now_s, timeout_s)
    return HungReport("\n".join(lines), facts)


def remedy(is_blocked: bool, has_folder: bool = True) -> str:
    """Return the remedy of a hang; `is_blocked`: ranks that do not wait keep others waiting."""
    if is_blocked:
        return _BLOCKED_REMEDY if has_folder else _SCRIPT_REMEDY
    return _MATCH_REMEDY if has_folder else _MATCH_REMEDY.replace("; then --resume", "")


def _call_roll(judgements: Sequence[tuple[Snapshot, str]], missing: Sequence[int]) -> str:
    waiting = [snapshot for snapshot, judgement in judgements if judgement.endswith(WAITING)]
    blocking = {
        snapshot.rank: next(words for state, words in _STATES.items() if judgement.endswith(state))
        for snapshot, judgement in judgements
        if not judgement.endswith(WAITING)
    }
    size = max((snapshot.size for snapshot, _ in judgements), default=0)
    return make_roll_call(waiting, blocking | dict.fromkeys(missing, NO_RECORD), size)


def missing_ranks(snapshots: Sequence[Snapshot]) -> list[int]:
    """Return the ranks without a record."""
    size = max((s.size for s in snapshots), default=0)
    return sorted(set(range(size)) - {s.rank for s in snapshots})


def judge_rank(snapshot: Snapshot, now_s: float, timeout_s: float) -> str:
    """Return the state of a rank, which ends in one of four constants."""
    # Heartbeat first: a rank that was stopped inside a call still seems to wait.
    age_s = max(now_s - snapshot.heartbeat, 0.0)
    if age_s > 3 * interval_s(timeout_s):  # a busy core may skip a beat or two
        return f"no heartbeat for {age_s:.0f} s: {SILENT}"
    if snapshot.has_ended:
        return ENDED
    return WAITING if snapshot.waiting_calls else f"heartbeat {age_s:.1f} s ago: {COMPUTING}"


def _describe_missing(rank: int, node: str | None) -> str:
    if node is None:
        return f"  rank {rank}: left no record: see its output"
    return f"  rank {rank}: no record came from its node {node}: is the node lost?"


def _describe_rank(snapshot: Snapshot, judgement: str, now_s: float, has_steps: bool) -> str:
    place_text = f"  rank {snapshot.rank} on {snapshot.host} (pid {snapshot.pid})"
    if judgement == ENDED:
        return f"{place_text}: {judgement}"
    place_text += f", step {snapshot.step}" * has_steps
    last_call = sorted(snapshot.calls, key=lambda call: call.start_s)[-1:]
    calls = ", ".join(
        _describe_call(call, now_s, has_steps) for call in snapshot.waiting_calls or last_call
    )
    call_kind = "in" if snapshot.waiting_calls else "last operation"
    return f"{place_text}, at {snapshot.line}: {judgement}; {call_kind} {calls or 'none'}"


def _describe_call(call: Call, now_s: float, has_steps: bool) -> str:
    peer = "all ranks" if call.peer == -1 else f"rank {call.peer}"
    timing = f"begun {max(now_s - call.start_s, 0.0):.1f} s ago"
    timing += f", step {call.step}" * has_steps + f", thread {call.thread}"
    return f"{call.operation} with {peer}, {call.nbytes} bytes, {timing}"


def make_ended_report(
    ended: Sequence[Snapshot], waiting: Sequence[Snapshot], now_s: float
) -> HungReport:
    """Return the report of ranks that wait for others whose script has ended, or in other calls."""
    ended_text = ", ".join(f"rank {snapshot.rank}" for snapshot in ended)
    facts = [f"{ended_text} {ENDED}"] if ended else []
    first, *rest = waiting
    facts.append(f"rank {first.rank} waits in {_describe_first_call(first)}")
    if not ended:
        first_call = _first_call(first)
        calls = ((s, _first_call(s)) for s in rest)
        other_snapshot = next(
            s
            for s, c in calls
            if (c.thread, c.operation) != (first_call.thread, first_call.operation)
        )
        facts.append(f"rank {other_snapshot.rank} in {_describe_first_call(other_snapshot)}")
    judgements = [*((s, ENDED) for s in ended), *((s, WAITING) for s in waiting)]
    missing = missing_ranks([*ended, *waiting])
    text = "\n".join(
        [
            f"hung: {', '.join(facts)}: do ranks have different numbers of batches?",
            *(_describe_rank(s, ENDED, now_s, has_steps=False) for s in ended),
            *(_describe_rank(s, WAITING, now_s, has_steps=False) for s in waiting),
            "what to do: make all ranks call the same operations in the same order",
            _call_roll(judgements, ()),  # these are the ranks of one node
        ]
    )
    return HungReport(text, make_facts(judgements, missing, {}, now_s, None))


def _first_call(snapshot: Snapshot) -> Call:
    return min(snapshot.waiting_calls, key=lambda call: call.start_s)


def _describe_first_call(snapshot: Snapshot) -> str:
    return f"{_first_call(snapshot).operation} ({snapshot.line.split()[0]})"


def write_report(directory: Path, report: HungReport) -> bool:
    """Write hung-report.txt and .json; return True on the one rank that reports for the job."""
    try:
        with opening.create(directory / REPORT_NAME, LEVELS, exclusive=True) as stream:
            stream.write(report.text.encode())
        facts = json.dumps(report.facts, indent=1)
        atomic.replace(directory / FACTS_NAME, f"{facts}\n", LEVELS)
    except OSError as error:
        # On a full disk or a lost folder all ranks report, rather than none.
        return not isinstance(error, FileExistsError)
    return True


def dump_stacks(path: Path) -> None:
    """Write the stacks of this process's threads to `path`, or to stderr if that fails."""
    try:
        with opening.create(path, LEVELS) as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
    except OSError:
        # A full disk must not keep the watch from ending the job.
        faulthandler.dump_traceback(2, all_threads=True)
