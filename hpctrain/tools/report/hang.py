"""The report of `hpctrain hang`: what each rank of a job does, or did last, and the remedy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.run_files.folder_lock import is_locked
from hpctrain.tools.report import history
from hpctrain.watch import diagnosis
from hpctrain.watch.diagnosis import ALIVE, DEAD, UNKNOWN, Diagnosis, RankState
from hpctrain.watch.hung_facts import rank_facts, utc
from hpctrain.watch.layout import Call
from hpctrain.watch.report import remedy
from hpctrain.watch.roll_call import NO_RECORD, make_roll_call

MAX_ROWS = 64  #: of the table; ranks that others wait for come first
_LONG_S = 10.0  #: a wait for longer is no part of a usual step
_FINAL = ("done", "stopped", "failed", "hung")


class JobState(NamedTuple):
    """A job: its run's state, and its ranks' states."""

    run: Path
    status: str  #: running, killed, or as in summary.json
    reason: str
    now_s: float
    diagnosis: Diagnosis


def read_job(run: Path) -> JobState:
    """Return the state of the job in the folder of a run; raise UsageError without records."""
    now_s, is_running = time.time(), is_locked(run)
    summary = (run_folder.read_summary(run) or {}) if not is_running else {}
    status = history.RUNNING if is_running else summary.get("status") or history.KILLED
    result = diagnosis.diagnose(run / "watch", now_s, is_running=is_running)
    if not result.ranks:
        end_text = f"the run ended with status {status}: " if status in _FINAL else ""
        raise UsageError(
            f"{run}: {end_text}expected records of its ranks in {run / 'watch'}, seen none. They "
            "are removed when a run ends well; is this the folder of a run (--out)?"
        )
    return JobState(run, status, summary.get("reason") or "", now_s, result)


def as_json(job: JobState, last: int) -> dict[str, Any]:
    """Return the facts, with the `last` operations of each rank."""
    result = job.diagnosis
    return {
        "schema": 1,
        "folder": str(job.run),
        "status": job.status,
        "reason": job.reason,
        "time": utc(job.now_s),
        "behind": result.behind,
        "waited_for": result.waited_for,
        "died_in_call": result.died_in_call,
        "silent_first": result.silent_first,
        "unread_nodes": list(result.unread_nodes),
        "ranks": [
            {"rank": state.rank, "node": state.node, "life": state.life}
            | ({**rank_facts(state.record, state.life, last)} if state.record else {})
            for state in result.ranks
        ],
        "remedy": list(remedies(job)),
    }


def print_report(job: JobState, last: int) -> None:
    """Print the table, the last operations of each rank if `last`, the conclusions, the remedy."""
    from rich.text import Text

    from hpctrain.core.fitted_table import fit_table, make_table, stdout_console

    console = stdout_console(history.DEFAULT_WIDTH)
    headings = ("rank", "host", "state", "step", "last operation", "since", "line")
    result = job.diagnosis
    notable_ranks = {*result.waited_for, *result.silent_first, *result.behind}
    states = sorted(result.ranks, key=lambda state: state.rank not in notable_ranks)
    table = make_table(headings, map(_rank_cells, states[:MAX_ROWS]), *headings)
    console.print(fit_table(table, console))
    hidden = len(states) - MAX_ROWS
    lines = [f"and {hidden} more ranks: --json shows all"] if hidden > 0 else []
    for state in states[:MAX_ROWS] if last else ():
        lines += [f"rank {state.rank}, last operations:", *_last_operations(state, last)]
    for line in [*lines, *conclusions(job), *remedies(job)]:
        console.print(Text(line), soft_wrap=True)


def _rank_cells(state: RankState) -> tuple[str, ...]:
    record, call = state.record, state.last_call
    if record is None:
        return (str(state.rank), state.node, state.life, "-", "-", "-", "-")
    life_text = (
        f"{state.life}, waits" if call and call.is_waiting and state.life != DEAD else state.life
    )
    operation = "in " * bool(call and call.is_waiting) + (_describe_call(call) if call else "none")
    times = _call_times_text(call, state.as_of_s) if call else "-"
    return str(state.rank), record.host, life_text, str(record.step), operation, times, record.line


def _describe_call(call: Call) -> str:
    peer = "all ranks" if call.peer == -1 else f"rank {call.peer}"
    return f"{call.operation} with {peer}, {call.nbytes:,} bytes"


def _call_times_text(call: Call, as_of_s: float) -> str:
    """Return when a call began and for how long it lasts, or when it ended."""
    if call.is_waiting:
        return f"{_clock_text(call.start_s)}, for {max(as_of_s - call.start_s, 0):.1f} s"
    return f"ended {_clock_text(call.end_s or call.start_s)}"


def _clock_text(seconds: float) -> str:
    millis = f"{seconds % 1:.3f}"[1:] if seconds % 1 < 0.9995 else ".999"
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds)) + millis
    except (ValueError, OverflowError, OSError):  # its rank was writing
        return "?"


def _last_operations(state: RankState, last: int) -> Iterator[str]:
    for call in state.record.history[-last:] if state.record else ():
        length = "not over" if call.end_s is None else f"{1e3 * (call.end_s - call.start_s):.3f} ms"
        yield (
            f"  {_clock_text(call.start_s)}  step {call.step}  {_describe_call(call)}, "
            f"thread {call.thread}: {length}"
        )


def conclusions(job: JobState) -> Iterator[str]:
    """Yield a line per fact that the records of several ranks show together."""
    result = job.diagnosis
    yield f"{job.run}: {job.status}" + (f": {job.reason.splitlines()[0]}" if job.reason else "")
    steps = {state.rank: state.step for state in result.ranks}
    if result.behind:
        yield f"behind: {_ranks_text(result.behind)}, in step {steps[result.behind[0]]}"
    if result.waited_for:
        yield f"others wait for: {_ranks_text(result.waited_for)}"
    elif _is_stuck(job) and all(state.waiting_calls for state in result.ranks):
        yield "every rank waits: compare their operations, peers and lines"
    if result.died_in_call:
        yield f"dead in an operation: {_ranks_text(result.died_in_call)}"
    if result.silent_first:
        yield f"first without a heartbeat on its node: {_ranks_text(result.silent_first)}"
    for node in result.unread_nodes:
        yield f"node {node}: its records are neither on this host nor in {job.run / 'watch'}"


def remedies(job: JobState) -> Iterator[str]:
    """Yield the lines that describe the remedy."""
    result = job.diagnosis
    if result.unread_nodes:
        yield (
            f"on each such node: `hpctrain hang --collect {job.run}`; a node that does not "
            "answer is lost"
        )
    if job.status != history.RUNNING:
        suspects = result.waited_for or result.silent_first
        if suspects:
            yield (
                f"look at the output of {_ranks_text(suspects)}, and on its host into `dmesg`: "
                "memory?"
            )
        yield f"then start the job again with --out {job.run} --resume"
    elif _is_stuck(job):
        yield from remedy(bool(result.waited_for)).splitlines()
        yield _call_roll(result)
    else:
        yield f"nothing hangs: no wait of over {_LONG_S:g} s"


def _call_roll(result: Diagnosis) -> str:
    waiting = {
        state.rank: state.record
        for state in result.ranks
        if state.record and state.waiting_calls and state.life == ALIVE
    }
    words = {ALIVE: f"{ALIVE}, perhaps only slow", UNKNOWN: NO_RECORD}
    blocking = {
        state.rank: words.get(state.life, state.life)
        for state in result.ranks
        if state.rank not in waiting
    }
    return make_roll_call([*waiting.values()], blocking, len(result.ranks))


def _is_stuck(job: JobState) -> bool:
    """Return whether a rank waits for longer than in any usual step, or has died so."""
    calls = [call for state in job.diagnosis.ranks for call in state.waiting_calls]
    return any(job.now_s - call.start_s > _LONG_S for call in calls)


def _ranks_text(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {names}"
