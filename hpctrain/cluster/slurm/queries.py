"""States of jobs in Slurm: from scontrol, and from sacct once the controller has forgotten them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.core.errors import HpctrainError, UsageError

NO_LONGER_KNOWN = "Slurm has forgotten it"
NO_ANSWER = "NO ANSWER"
LIMIT_S = 120.0  #: a busy controller answers late
#: Error text of Slurm's commands after a lost answer: the request may or may not have been done.
_LOST_REPLY = re.compile(
    "timed out|Zero Bytes were transmitted|receive failure|Connection reset", re.I
)
_NO_CONTACT = re.compile(f"Unable to contact|{_LOST_REPLY.pattern}", re.I)
JobId = int | str  #: 17, or 17_2 for a task of an array
_UNKNOWN_JOB = (
    "no {command} on this PATH, so no Slurm: call this on a login node of the cluster. Here, "
    "`hpctrain slurm render` prints the script, and `hpctrain launch -n 4 train ...` starts ranks"
)


@dataclass(frozen=True)
class JobState:
    """The state of a job, or of one task of an array, in Slurm."""

    job: str  #: 17, or 17_2 for a task of an array
    state: str  #: PENDING, RUNNING, COMPLETED ...; UNKNOWN once Slurm has forgotten it
    reason: str = ""
    restarts: int | None = None
    elapsed: str = ""
    nodes: str = ""
    exit_code: str = ""  #: of the script, and the signal: 1:0
    log: str = ""  #: the file with the job's output, if Slurm reports it


class NoAnswerError(HpctrainError):
    """Slurm's controller has not answered: the state of jobs is unknown."""


def from_slurm(job: JobId) -> list[JobState]:
    """Return the state of `job`, for an array that of each task.

    The controller forgets jobs some minutes after their end; then accounting is queried. Raises
    NoAnswerError, or HpctrainError with Slurm's words.
    """
    return from_scontrol(job) or from_sacct(job) or [JobState(str(job), "UNKNOWN", NO_LONGER_KNOWN)]


def from_scontrol(job: JobId) -> list[JobState]:
    """Return the states of `job` in the controller, empty where it has forgotten the job."""
    must_have("scontrol")
    process = run(["scontrol", "--oneliner", "show", "job", str(job)])
    if process.returncode == 0:
        return _tasks(process.stdout)
    if "Invalid job id" in process.stderr:
        return []
    kind = NoAnswerError if _NO_CONTACT.search(process.stderr) else HpctrainError
    raise kind(f"scontrol does not show jobs: {process.stderr.strip()}")


def reply_was_lost(stderr: str) -> bool:
    """Return whether `stderr` means that the reply was lost, so the request may have been done."""
    return _LOST_REPLY.search(stderr) is not None


def _tasks(output: str) -> list[JobState]:
    """Return the states in scontrol's output; that of a heterogeneous job is its first part's."""
    states = []
    for line in output.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if fields and fields.get("HetJobOffset", "0") == "0":
            array = "ArrayTaskId" in fields
            job = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}" if array else fields["JobId"]
            reason = "" if fields["Reason"] == "None" else fields["Reason"]
            restarts = int(fields.get("Restarts", 0))
            names = fields.get("NodeList", "").replace("(null)", "")
            state = JobState(job, fields["JobState"], reason, restarts, fields["RunTime"], names,
                         fields.get("ExitCode", ""), _path(line, "StdOut"))  # fmt: skip
            states += [replace(state, job=task) for task in tasks_in(job)]
    return sorted(states, key=lambda state: [int(n) for n in re.findall(r"\d+", state.job)])


def _path(line: str, field: str) -> str:
    """Return the path in a field of a line of scontrol; it may hold blanks."""
    match = re.search(rf" {field}=(.*?)(?= \w+=|$)", line)
    return match[1].strip() if match else ""


def tasks_in(job: str) -> list[str]:
    """Return the tasks of a range in Slurm's notation: 17_2-4%1 means 17_2, 17_3 and 17_4."""
    array, sign, ranges = job.partition("_")
    if not sign:
        return [job]
    parts = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", ranges.partition("%")[0])
    runs = [range(int(a), int(b or a) + 1, int(stride or 1)) for a, b, stride in parts]
    return [f"{array}_{task}" for run in runs for task in run]


def from_sacct(job: JobId) -> list[JobState]:
    """Return the states of `job` in accounting; empty where there is none or no answer."""
    if shutil.which("sacct") is None:
        return []
    line = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}"]
    if clusters := os.environ.get("SLURM_CLUSTERS"):  # which the other commands read by themselves
        line.append(f"--clusters={clusters}")
    try:
        process = run([*line, "--format=JobID,State,Elapsed,NodeList,ExitCode"])
    except NoAnswerError:
        return []
    rows = [row.split("|") for row in process.stdout.splitlines() if row.count("|") == 4]
    # "CANCELLED by 1000"
    states = [
        JobState(i, s.split()[0], elapsed=e, nodes=n, exit_code=code)
        for i, s, e, n, code in rows
        if "+1" not in i
    ]
    return [replace(state, job=task) for state in states for task in tasks_in(state.job)]


def must_have(command: str) -> None:
    """Raise UsageError where there is no such command, and so no Slurm."""
    if shutil.which(command) is None:
        raise UsageError(_UNKNOWN_JOB.format(command=command))


def run(
    line: Sequence[str], text: str = "", ignored: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm with `text` as its input and without the `ignored` variables.

    Raises NoAnswerError after LIMIT_S.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    inherited = {name: value for name, value in os.environ.items() if name not in ignored}
    environ = {**inherited, "PATH": path}
    try:
        return subprocess.run(
            line, input=text, env=environ, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{line[0]} has not answered within {LIMIT_S:.0f} s") from None
