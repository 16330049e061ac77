"""The promises, checked after each attempt and at the end; a broken one is a sentence.

An attempt may have any of several exit codes under a fault, if that took place. With 0 the fault
came when the job was over, or it bore it; then the run must be complete.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain import checkpoint
from hpctrain.core.run_files import run_folder
from hpctrain.tools.chaos import regimes
from hpctrain.tools.chaos.attempt import Attempt
from hpctrain.tools.chaos.case import Case, FailingFile, Fault, HostFault, LinkCall, Signal

LINGER_S = 9.0  #: the guard of `hpctrain launch` gives ranks 6.5 s to save
NOT_BEGUN = re.compile(r"before a run began|while no rank ran|interrupted")
#: The files of a run that has completed.
FILES = re.compile(
    r"recipe\.toml|metrics\.jsonl|summary\.json|\.lock|\.redone|watch|replay|checkpoints"
    r"|replay/rank-\d{5}\.jsonl"
    r"|checkpoints/step-\d{8}(\.\d+)?(/(part-\d{5}\.safetensors|manifest\.json))?"
)
FILES_AFTER_HANG = re.compile(r"watch/(stacks-\d{5}\.txt|hung-report\.(txt|json))")
#: Also of the watch: without `hpctrain launch` nobody moves its records when all ranks are killed.
FILES_OF_MPI = re.compile(r"sysv|mpich_shm_|sm_segment\.|ompi\.|prte\.|pmix-|hpctrain-watch-")
GAP, NO_COPY = "has a gap", "of which no copy is left"
#: exit codes of hpctrain's own, and the status in the summary
STATUS = {0: "done", 1: "failed", 2: "failed", 3: "failed", 75: "stopped", 86: "hung",
          130: "failed"}  # fmt: skip
OWN_LAUNCHERS = ("launch", "elastic", "threads")  #: those that return the exit code of the job
ANY_CODE = frozenset(range(-64, 256))
DONE, LOST = frozenset({0}), frozenset({0, 1})


def problems_of(case: Case, faults: Sequence[Fault], ending: Attempt, run: Path) -> Iterator[str]:
    """Yield the promises that the end of an attempt breaks."""
    if ending.code is None:
        yield f"hung: still running after {ending.seconds:.0f} s"
        return
    codes = allowed_codes(case, faults if ending.fired else ())
    if case.is_elastic and ending.fired and _may_end(case, ending, run):
        codes |= {1}
    if ending.code not in codes:
        yield f"exit code {ending.code}, expected one of {sorted(codes)[:9]}"
    if _has_traceback(faults, ending.stderr):
        yield "a traceback"
    yield from _left_behind(case, ending)
    # Where a host dies, MPI's own launcher may end with any code.
    if ending.code in STATUS and not any(isinstance(fault, HostFault) for fault in faults):
        yield from _problems_of_summary(case, ending, run)


def _may_end(case: Case, ending: Attempt, run: Path) -> bool:
    """Return whether an elastic job may end although enough ranks are left.

    Before a run begins ranks do not train yet. Where a rank is lost with all copies of its state,
    only a checkpoint helps, and there may be none yet.
    """
    copies = case.recipe.get("elastic", {}).get("copies", 1)
    has_lost_copies = regimes.has_shards(case.recipe) and lost_ranks(case) > copies
    return f"folder: {run}" not in ending.stderr or (has_lost_copies and NO_COPY in ending.stderr)


def _left_behind(case: Case, ending: Attempt) -> Iterator[str]:
    if ending.processes:
        yield f"processes left: {list(ending.processes.values())}"
    if ending.lingered_s > LINGER_S:
        yield f"processes ended {ending.lingered_s:.1f} s after their launcher"
    if spare := _not_of_mpi(case, ending.shared_memory):
        yield f"shared memory left: {spare}"
    if spare := _not_of_mpi(case, ending.temporary):
        yield f"temporary files left: {spare}"


def _not_of_mpi(case: Case, names: list[str]) -> list[str]:
    """Return the names but those that MPI's own launcher leaves when it, or a rank, is killed."""
    return [n for n in names if case.launcher in OWN_LAUNCHERS or not FILES_OF_MPI.match(n)]


def _has_traceback(faults: Sequence[Fault], stderr: str) -> bool:
    """Return whether an error had no message of its own.

    A Ctrl-C may interrupt Python itself, before it runs a line of hpctrain.
    """
    interrupted = any(
        isinstance(fault, Signal) and (fault.signal, fault.step) == ("SIGINT", None)
        for fault in faults
    )
    has_traceback = "Traceback (most recent call last)" in stderr
    return has_traceback and not (interrupted and "/hpctrain/" not in stderr)


def _problems_of_summary(case: Case, ending: Attempt, run: Path) -> Iterator[str]:
    summary = read_summary(run)
    if NOT_BEGUN.search(ending.stderr) or (ending.code in (1, 2) and summary is None):
        return
    if ending.code == 2 and "refuse" not in ending.stderr:
        return  # reported before a run began: an earlier attempt wrote the summary
    if ending.code == 130 and summary is not None:
        return  # a second Ctrl-C, after the run had ended: launch reports it, the summary the first
    if case.launcher not in OWN_LAUNCHERS and ending.code not in (0, 75, 86):
        return  # no rank was left to write it
    if summary is None:
        yield f"exit code {ending.code} without a summary"
    elif (ending.code, summary["status"]) == (1, "done") and lost_ranks(case) >= case.job_ranks:
        return  # every rank was killed, the last one after it had written the summary
    elif (summary["exit_code"], summary["status"]) != (ending.code, STATUS.get(ending.code or 0)):
        yield f"exit code {ending.code}, summary {summary['status']} {summary['exit_code']}"


def read_summary(run: Path) -> dict[str, Any] | None:
    """Return the summary of a run; None if it has none that can be read."""
    try:
        return run_folder.read_summary(run)
    except (OSError, ValueError):
        return None


def problems_at_end(case: Case, run: Path, *, hung: bool) -> Iterator[str]:
    """Yield the promises that the folder of a completed run breaks."""
    total, summary = case.steps, read_summary(run)
    if summary is None or (summary["status"], summary.get("steps")) != ("done", total):
        yield f"the summary does not tell of a complete run: {summary}"
    else:
        if summary["samples"] != case.samples_of(total):
            yield f"{summary['samples']} samples, expected {case.samples_of(total)}"
        yield from problems_of_recoveries(case, summary)
    yield from problems_of_rows(case, run / run_folder.METRICS)
    expected = [FILES, FILES_AFTER_HANG] if hung else [FILES]
    names = [str(path.relative_to(run)) for path in sorted(run.rglob("*"))]
    if spare := [n for n in names if not any(pattern.fullmatch(n) for pattern in expected)]:
        yield f"files left: {spare}"
    for path in sorted((run / "checkpoints").glob("step-*")):
        if fault := checkpoint.verify(path):
            yield f"{path.name} is damaged: {fault}"


def problems_of_recoveries(case: Case, summary: dict[str, Any]) -> Iterator[str]:
    """Yield recoveries that lost committed steps: survivors hold the last committed one.

    State that no other rank holds is copied every `[elastic] copy_steps` to `copies` ranks. Where
    more are lost at once, training goes on from the newest checkpoint.
    """
    elastic = case.recipe.get("elastic", {})
    for recovery in summary.get("recoveries") or []:
        limit = elastic.get("copy_steps", 10) if regimes.has_shards(case.recipe) else 0
        if limit and len(recovery["ranks"]) > elastic.get("copies", 1):
            limit = case.recipe.get("checkpoint", {}).get("every_steps", case.steps)
        if recovery["steps_redone"] > limit:
            yield f"a recovery redid {recovery['steps_redone']} committed steps, at most {limit}"


def problems_of_rows(case: Case, path: Path) -> Iterator[str]:
    """Yield places where rows of metrics do not have each step and sample exactly once."""
    last_step, total_steps = 0, case.steps
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
        except ValueError:
            yield f"{path.name}:{number} is no JSON: {line[:60]!r}"
            continue
        if (row["step"] - row["steps"], row["samples"]) != (
            last_step,
            case.samples_of(row["step"]),
        ):
            yield f"{path.name}:{number} has steps {row['step'] - row['steps']} to {row['step']}"
            yield f"after step {last_step}, {row['samples']} samples"
        last_step = row["step"]
    if last_step != total_steps:
        yield f"{path.name} ends at step {last_step} of {total_steps}"


def allowed_codes(case: Case, faults: Sequence[Fault]) -> frozenset[int]:
    """Return the exit codes that an attempt may have under `faults`."""
    return DONE.union(*(_codes(case, fault) for fault in faults)) if faults else DONE


def _codes(case: Case, fault: Fault) -> frozenset[int]:
    if isinstance(fault, Signal):
        return _codes_of_signal(case, fault)
    if isinstance(fault, HostFault):
        return DONE if fault.effect == "slow" else ANY_CODE
    is_fatal = fault.is_fatal if isinstance(fault, FailingFile) else isinstance(fault, LinkCall)
    return _lost_rank(case) if is_fatal else frozenset({0, 1, 2})


def _lost_rank(case: Case) -> frozenset[int]:
    """Return the codes of a job that loses ranks: an elastic one goes on if enough are left.

    It ends if all ranks that trained are lost, although spares are left.
    """
    if case.is_elastic:
        lost = lost_ranks(case)
        ranks_left = min(case.ranks, case.job_ranks - lost)
        return DONE if lost < case.ranks and regimes.fits(case.recipe, ranks_left) else LOST
    return LOST if case.launcher in OWN_LAUNCHERS else ANY_CODE


def lost_ranks(case: Case) -> int:
    """Return the number of ranks that the faults of `case` kill, at most.

    A signal to a rank that was lost hits another one in its place.
    """
    signals = [f for f in case.faults if isinstance(f, Signal) and f.target >= 0]
    killed = sum(1 + len(f.others) for f in signals if f.signal in ("SIGKILL", "SIGSTOP"))
    calls = [f for f in case.faults if isinstance(f, LinkCall)]
    threads = {rank for fault in calls for rank in (fault.rank, *fault.others)}
    files = [f for f in case.faults if isinstance(f, FailingFile) and f.is_fatal]
    return killed + len(threads) + len(files)


def _codes_of_signal(case: Case, fault: Signal) -> frozenset[int]:
    launched = case.launcher in OWN_LAUNCHERS
    if fault.is_orphaning:
        return frozenset({-9})
    if fault.target < 0 and not launched and (fault.signal != "SIGUSR1" or fault.step is None):
        return ANY_CODE  # the MPI's launcher decides
    if fault.signal == "SIGKILL":
        return _lost_rank(case) if fault.step is not None or fault.during == "recovery" else LOST
    if fault.signal == "SIGSTOP":
        return frozenset({0, 86}) | (_lost_rank(case) if case.is_elastic else DONE)
    codes = {0, 75, 130} if fault.signal == "SIGINT" else {0, 75}
    if fault.step is None:  # perhaps while Python itself starts: then nothing has begun
        codes |= {-signal.Signals[fault.signal], 1}
    return frozenset(codes)
