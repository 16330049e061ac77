"""What Slurm says of jobs: scontrol, and sacct once the controller has forgotten them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import HpctrainError, UsageError

FORGOTTEN = "Slurm has forgotten it"
NO_ANSWER = "NO ANSWER"
LIMIT_S = 120.0  #: a busy controller answers late
#: What Slurm's commands say where no answer came: what was asked for may have been done or not.
_LATE = re.compile("timed out|Zero Bytes were transmitted|receive failure|Connection reset", re.I)
_AWAY = re.compile(f"Unable to contact|{_LATE.pattern}", re.I)
Job = int | str  #: 17, or 17_2 for a task of an array
_ABSENT = (
    "no {command} on this PATH, so no Slurm: call this on a login node of the cluster. Here, "
    "`hpctrain slurm render` prints the script, and `hpctrain launch -n 4 train ...` starts ranks"
)


@dataclass(frozen=True)
class State:
    """What Slurm says of a job, or of one task of an array."""

    job: str  #: 17, or 17_2 for a task of an array
    state: str  #: PENDING, RUNNING, COMPLETED ...; UNKNOWN once Slurm has forgotten it
    reason: str = ""
    restarts: int | None = None
    elapsed: str = ""
    nodes: str = ""
    exit_code: str = ""  #: of the script, and the signal: 1:0
    log: str = ""  #: what the job says, as far as Slurm tells


class Silence(HpctrainError):
    """Slurm's controller has not answered: nothing is known."""


def ask(job: Job) -> list[State]:
    """Return what Slurm says of `job`, for an array of each of its tasks.

    The controller forgets jobs some minutes after their end; then accounting is asked. Raises
    Silence, or HpctrainError with Slurm's words.
    """
    return controlled(job) or accounted(job) or [State(str(job), "UNKNOWN", FORGOTTEN)]


def controlled(job: Job) -> list[State]:
    """Return what the controller says of `job`, nothing where it has forgotten it."""
    must_have("scontrol")
    done = run(["scontrol", "--oneliner", "show", "job", str(job)])
    if done.returncode == 0:
        return _tasks(done.stdout)
    if "Invalid job id" in done.stderr:
        return []
    kind = Silence if _AWAY.search(done.stderr) else HpctrainError
    raise kind(f"scontrol does not tell of jobs: {done.stderr.strip()}")


def answers_late(said: str) -> bool:
    """Return whether a command that says this was heard, it may be, and its answer got lost."""
    return _LATE.search(said) is not None


def _tasks(told: str) -> list[State]:
    """Return the states in the output of scontrol; of a heterogeneous job its first part tells."""
    found = []
    for line in told.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if fields and fields.get("HetJobOffset", "0") == "0":
            array = "ArrayTaskId" in fields
            job = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}" if array else fields["JobId"]
            reason = "" if fields["Reason"] == "None" else fields["Reason"]
            restarts = int(fields.get("Restarts", 0))
            names = fields.get("NodeList", "").replace("(null)", "")
            seen = State(job, fields["JobState"], reason, restarts, fields["RunTime"], names,
                         fields.get("ExitCode", ""), _path(line, "StdOut"))  # fmt: skip
            found += [replace(seen, job=task) for task in tasks_in(job)]
    return sorted(found, key=lambda state: [int(n) for n in re.findall(r"\d+", state.job)])


def _path(line: str, field: str) -> str:
    """Return the path in a field of a line of scontrol; it may hold blanks."""
    found = re.search(rf" {field}=(.*?)(?= \w+=|$)", line)
    return found[1].strip() if found else ""


def tasks_in(job: str) -> list[str]:
    """Return the tasks that Slurm speaks of as one: those of 17_2-4%1 are 17_2, 17_3 and 17_4."""
    array, sign, named = job.partition("_")
    if not sign:
        return [job]
    parts = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", named.partition("%")[0])
    runs = [range(int(a), int(b or a) + 1, int(stride or 1)) for a, b, stride in parts]
    return [f"{array}_{task}" for run in runs for task in run]


def accounted(job: Job) -> list[State]:
    """Return what accounting says of `job`, nothing where there is none, or it does not answer."""
    if shutil.which("sacct") is None:
        return []
    line = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}"]
    if named := os.environ.get("SLURM_CLUSTERS"):  # which the other commands read by themselves
        line.append(f"--clusters={named}")
    try:
        done = run([*line, "--format=JobID,State,Elapsed,NodeList,ExitCode"])
    except Silence:
        return []
    rows = [row.split("|") for row in done.stdout.splitlines() if row.count("|") == 4]
    # "CANCELLED by 1000"
    told = [
        State(i, s.split()[0], elapsed=e, nodes=n, exit_code=code)
        for i, s, e, n, code in rows
        if "+1" not in i
    ]
    return [replace(state, job=task) for state in told for task in tasks_in(state.job)]


def must_have(command: str) -> None:
    """Raise UsageError where there is no such command, and so no Slurm."""
    if shutil.which(command) is None:
        raise UsageError(_ABSENT.format(command=command))


def run(
    line: Sequence[str], text: str = "", without: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm with `text` as its input, `without` some variables.

    Raises Silence after LIMIT_S.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    kept = {name: value for name, value in os.environ.items() if name not in without}
    environ = {**kept, "PATH": path}
    try:
        return subprocess.run(
            line, input=text, env=environ, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise Silence(f"{line[0]} has not answered within {LIMIT_S:.0f} s") from None
