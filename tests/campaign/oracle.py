"""Conditions after each attempt and after the completed run; a violation is one sentence."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaign.attempt import Attempt
from campaign.case import BATCH, SAMPLES, Case, FailingFile, Fault, Signal
from hpctrain import checkpoint
from hpctrain.run_files import run_folder

STATUS = {0: "done", 1: "failed", 2: "failed", 3: "failed", 75: "stopped", 86: "hung",
          130: "failed"}  # fmt: skip
OWN = frozenset(STATUS)
ANY_ = frozenset(range(-64, 256))
LINGER_S = 9.0  # the guard of `hpctrain launch` gives ranks 6.5 s to save
FATAL = ("kill", "after", "torn")
NOT_BEGUN = re.compile(r"before a run began|while no rank ran|interrupted")
# A run's files, once it has completed.
FILES = re.compile(
    r"recipe\.toml|metrics\.jsonl|summary\.json|\.lock|\.redone|watch|replay|checkpoints"
    r"|replay/rank-\d{5}\.jsonl"
    r"|checkpoints/step-\d{8}(\.\d+)?(/(part-\d{5}\.safetensors|manifest\.json))?"
)
AFTER_HANG = re.compile(r"watch/(stacks-\d{5}\.txt|hung-report\.(txt|json))")
# Of the watch: without `hpctrain launch` nobody moves its records when all ranks are killed.
OF_MPI = re.compile(r"sysv|mpich_shm_|sm_segment\.|ompi\.|prte\.|pmix-|hpctrain-watch-")
GAP = "has a gap"


def expected_codes(case: Case, fault: Fault | None) -> frozenset[int]:
    """Return the exit codes that an attempt may have under `fault`, if that took place.

    With 0 the fault came when the job was over, or it bore it; then the run must be complete.
    """
    if fault is None:
        return frozenset({0})
    lost = frozenset({0, 1}) if case.launcher == "launch" else ANY_
    if isinstance(fault, Signal):
        return _codes_of_signal(fault, case.launcher == "launch", lost)
    if isinstance(fault, FailingFile) and fault.effect in FATAL:
        return lost
    return frozenset({0, 1, 2})


def _codes_of_signal(fault: Signal, launched: bool, lost: frozenset[int]) -> frozenset[int]:
    if fault.target < 0 and fault.signal == "SIGKILL":
        return frozenset({-9})
    if fault.target < 0 and not launched and (fault.signal != "SIGUSR1" or fault.step is None):
        return lost  # what becomes of it is the MPI's decision
    if fault.signal == "SIGKILL":
        return lost
    if fault.signal == "SIGSTOP":
        return frozenset({0, 86})
    codes = {0, 75, 130} if fault.signal == "SIGINT" else {0, 75}
    if fault.step is None:  # perhaps while Python itself starts: then nothing has begun
        codes.add(-signal.Signals[fault.signal])
    return frozenset(codes)


def problems_of(case: Case, fault: Fault | None, seen: Attempt, run: Path) -> Iterator[str]:
    """Yield what is wrong with the end of one attempt."""
    if seen.code is None:
        yield f"hung: still running after {seen.seconds:.0f} s"
        return
    codes = expected_codes(case, fault if seen.fired else None)
    if seen.code not in codes:
        yield f"exit code {seen.code}, expected one of {sorted(codes)[:9]}"
    if "Traceback (most recent call last)" in seen.stderr and not _of_python(fault, seen.stderr):
        yield "a traceback"
    if seen.processes:
        yield f"processes left: {list(seen.processes.values())}"
    if seen.lingered_s > LINGER_S:
        yield f"processes ended {seen.lingered_s:.1f} s after their launcher"
    if spare := _not_of_mpi(case, seen.shared_memory):
        yield f"shared memory left: {spare}"
    if spare := _not_of_mpi(case, seen.temporary):
        yield f"temporary files left: {spare}"
    if seen.code in OWN:
        yield from _problems_of_summary(case, seen, run)


def _not_of_mpi(case: Case, names: list[str]) -> list[str]:
    """Return the names but those that stay under MPI's own launcher if it or a rank is killed."""
    return [n for n in names if case.launcher == "launch" or not OF_MPI.match(n)]


def _of_python(fault: Fault | None, stderr: str) -> bool:
    """Return whether a Ctrl-C interrupted Python itself, before it ran a line of ours."""
    interrupt = isinstance(fault, Signal) and (fault.signal, fault.step) == ("SIGINT", None)
    return interrupt and "/hpctrain/" not in stderr


def _problems_of_summary(case: Case, seen: Attempt, run: Path) -> Iterator[str]:
    summary = _read_summary(run)
    if NOT_BEGUN.search(seen.stderr) or (seen.code in (1, 2) and summary is None):
        return
    if seen.code == 2 and "refuse" not in seen.stderr:
        return  # said before a run began: the summary is that of an earlier attempt
    if seen.code == 130 and summary is not None:
        return  # a second Ctrl-C, after the run had ended: launch tells of the one, it of the other
    if case.launcher == "mpiexec" and seen.code not in (0, 75, 86):
        return  # nobody was left to write it
    if summary is None:
        yield f"exit code {seen.code} without a summary"
    elif (summary["exit_code"], summary["status"]) != (seen.code, STATUS[seen.code]):
        yield f"exit code {seen.code}, summary {summary['status']} {summary['exit_code']}"


def _read_summary(run: Path) -> dict[str, Any] | None:
    try:
        return run_folder.read_summary(run)
    except (OSError, ValueError):
        return None


def samples_of(step: int) -> int:
    """Return how many samples the first `step` steps take: each epoch's last batch is short."""
    steps = -(-SAMPLES // BATCH)
    return step // steps * SAMPLES + min(step % steps * BATCH, SAMPLES)


def problems_at_end(case: Case, run: Path, hung: bool) -> Iterator[str]:
    """Yield what is wrong with the folder of a run that has completed."""
    total, summary = case.recipe["run"]["steps"], _read_summary(run)
    if summary is None or (summary["status"], summary.get("steps")) != ("done", total):
        yield f"the summary does not tell of a complete run: {summary}"
    elif summary["samples"] != samples_of(total):
        yield f"{summary['samples']} samples, expected {samples_of(total)}"
    yield from problems_of_rows(run / run_folder.METRICS, total)
    names = (str(path.relative_to(run)) for path in sorted(run.rglob("*")))
    spare = [n for n in names if not FILES.fullmatch(n) and not (hung and AFTER_HANG.fullmatch(n))]
    if spare:
        yield f"files left: {spare}"
    for path in sorted((run / "checkpoints").glob("step-*")):
        if fault := checkpoint.verify(path):
            yield f"{path.name} is damaged: {fault}"


def problems_of_rows(path: Path, total: int) -> Iterator[str]:
    """Yield where the rows of metrics do not have each of `total` steps exactly once."""
    before = 0
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
        except ValueError:
            yield f"{path.name}:{number} is no JSON: {line[:60]!r}"
            continue
        if (row["step"] - row["steps"], row["samples"]) != (before, samples_of(row["step"])):
            yield f"{path.name}:{number} has steps {row['step'] - row['steps']} to {row['step']}"
            yield f"after step {before}, {row['samples']} samples"
        before = row["step"]
    if before != total:
        yield f"{path.name} ends at step {before} of {total}"
