"""States of Slurm jobs: from scontrol, or from sacct once the controller has forgotten the job."""

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

FORGOTTEN_REASON = "Slurm has forgotten it"
NO_ANSWER = "NO ANSWER"
COMMAND_TIMEOUT_S = 120.0  #: a busy controller answers late
#: Error text of a scheduler's commands after a lost answer: the request may have succeeded.
LOST_REPLY_PATTERN = re.compile(
    "timed out|Zero Bytes were transmitted|receive failure|Connection reset", re.I
)
_NO_CONTACT_PATTERN = re.compile(f"Unable to contact|{LOST_REPLY_PATTERN.pattern}", re.I)
_WITHOUT_SCHEDULER = (
    ". Here, `{render}` prints the script, and `hpctrain launch -n 4 train ...` starts ranks"
)
JobId = int | str  #: 17, or 17_2 for a task of an array
_NO_COMMAND_MESSAGE = "the PATH has no {command}: call this on a login node of its cluster"


@dataclass(frozen=True)
class JobState:
    """The state of a job, or of one task of an array, in Slurm."""

    job: str  #: 17, or 17_2 for a task of an array
    state: str  #: PENDING, RUNNING, COMPLETED ...; UNKNOWN once Slurm has forgotten it
    reason: str = ""
    restarts: int | None = None
    elapsed: str = ""
    nodes: str = ""
    exit_code: str = ""  #: exit code and signal of the script, as in 1:0
    log: str = ""  #: the file with the job's output, if Slurm reports the file


class NoAnswerError(HpctrainError):
    """Slurm's controller has not answered, so the state of jobs is unknown."""


def query_slurm(job: JobId) -> list[JobState]:
    """Return the state of `job`, or the states of all tasks of an array.

    The controller forgets jobs some minutes after their end; then accounting is queried. Raises
    NoAnswerError, or HpctrainError with Slurm's error text.
    """
    return (
        query_scontrol(job) or query_sacct(job) or [JobState(str(job), "UNKNOWN", FORGOTTEN_REASON)]
    )


def query_scontrol(job: JobId) -> list[JobState]:
    """Return the states of `job` in the controller; empty if it has forgotten the job."""
    require_command("scontrol")
    process = run_command(["scontrol", "--oneliner", "show", "job", str(job)])
    if process.returncode == 0:
        return _parse_scontrol(process.stdout)
    if "Invalid job id" in process.stderr:
        return []
    error_type = NoAnswerError if _NO_CONTACT_PATTERN.search(process.stderr) else HpctrainError
    raise error_type(f"scontrol does not show jobs: {process.stderr.strip()}")


def _parse_scontrol(output: str) -> list[JobState]:
    """Return the states in scontrol's output; of a heterogeneous job only its first part's."""
    states = []
    for line in output.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if fields and fields.get("HetJobOffset", "0") == "0":
            is_array_task = "ArrayTaskId" in fields
            job = (
                f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
                if is_array_task
                else fields["JobId"]
            )
            reason = "" if fields["Reason"] == "None" else fields["Reason"]
            restarts = int(fields.get("Restarts", 0))
            node_names = fields.get("NodeList", "").replace("(null)", "")
            log = re.search(r" StdOut=(.*?)(?= \w+=|$)", line)  # a path may contain blanks
            state = JobState(
                job,
                fields["JobState"],
                reason,
                restarts,
                elapsed=fields["RunTime"],
                nodes=node_names,
                exit_code=fields.get("ExitCode", ""),
                log=log[1].strip() if log else "",
            )
            states += [replace(state, job=task) for task in expand_task_range(job)]
    return sorted(states, key=lambda state: numbers_in(state.job))


def numbers_in(name: str) -> list[int]:
    """Return the numbers in the name of a job or of a folder, by which these are sorted."""
    return [int(n) for n in re.findall(r"\d+", name)]


def expand_task_range(job: str) -> list[str]:
    """Return the tasks of a range in Slurm's notation: 17_2-4%1 means 17_2, 17_3 and 17_4."""
    array_id, separator, ranges = job.partition("_")
    if not separator:
        return [job]
    range_fields = re.findall(r"(\d+)(?:-(\d+))?(?::(\d+))?", ranges.partition("%")[0])
    task_ranges = [
        range(int(a), int(b or a) + 1, int(stride or 1)) for a, b, stride in range_fields
    ]
    return [f"{array_id}_{task}" for task_range in task_ranges for task in task_range]


def query_sacct(job: JobId) -> list[JobState]:
    """Return the states of `job` in accounting; empty if there is no accounting or no answer."""
    if shutil.which("sacct") is None:
        return []
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}"]
    if clusters := os.environ.get("SLURM_CLUSTERS"):  # sacct alone does not read it
        command.append(f"--clusters={clusters}")
    try:
        process = run_command([*command, "--format=JobID,State,Elapsed,NodeList,ExitCode"])
    except NoAnswerError:
        return []
    rows = [row.split("|") for row in process.stdout.splitlines() if row.count("|") == 4]
    # The state may be "CANCELLED by 1000". ID+1 is the second part of a heterogeneous job.
    states = [
        JobState(task, state.split()[0], elapsed=elapsed, nodes=nodes, exit_code=exit_code)
        for task, state, elapsed, nodes, exit_code in rows
        if "+1" not in task
    ]
    return [replace(state, job=task) for state in states for task in expand_task_range(state.job)]


def require_command(command: str, render: str = "") -> None:
    """Raise UsageError if this command is not on the PATH; `render` works without the scheduler."""
    if shutil.which(command) is None:
        advice = _WITHOUT_SCHEDULER.format(render=render) if render else ""
        raise UsageError(_NO_COMMAND_MESSAGE.format(command=command) + advice)


def run_command(
    command: Sequence[str], input_text: str = "", removed_variables: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm with `input_text` as its stdin; this Python comes first on its PATH.

    `removed_variables` are not passed on. Raises NoAnswerError after COMMAND_TIMEOUT_S.
    """
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    inherited_variables = {
        name: value for name, value in os.environ.items() if name not in removed_variables
    }
    environ = {**inherited_variables, "PATH": search_path}
    try:
        return subprocess.run(
            command,
            input=input_text,
            env=environ,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(
            f"{command[0]} has not answered within {COMMAND_TIMEOUT_S:.0f} s"
        ) from None
