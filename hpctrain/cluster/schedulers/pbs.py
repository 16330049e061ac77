"""PBS, as the manual pages of OpenPBS have it: qsub, qstat, qdel, and their replies."""

from __future__ import annotations

import re

from hpctrain.cluster.schedulers.dialect import Dialect
from hpctrain.cluster.slurm.job import Job, job_name
from hpctrain.cluster.slurm.queries import (
    FORGOTTEN_REASON,
    JobId,
    JobState,
    NoAnswerError,
    require_command,
    run_command,
)
from hpctrain.core.errors import HpctrainError

_OPTIONS = {
    "account": "-A {}", "queue": "-q {}", "project": "-P {}", "dependency": "-W depend={}",
    "select": "{}", "place": "{}",
    **{letter: f"-{letter} {{}}" for letter in "aAclmMpPquvW"}, "h": "-h", "V": "-V",
}  # fmt: skip
_NO_PROPERTY = "it is no property of a job; call qsub with the output of `hpctrain pbs render`"
_OWN_FOLDER = "the output goes to the run's folder"
_RESERVED = {
    "N": "use --job-name",
    "J": "a task of an array cannot submit itself again",
    "r": "use --max-restarts",
    **dict.fromkeys(("o", "e", "j", "k", "R"), _OWN_FOLDER),
    "S": "the script is one of bash",
    **dict.fromkeys(("C", "f", "G", "I", "X", "z", "block"), _NO_PROPERTY),
    "nodes": "use --nodes",
    "ncpus": "use --cpus-per-task",
    "mpiprocs": "use --tasks-per-node",
    "ngpus": "use --gpus-per-node",
    "walltime": "use --time",
    "depend": "use --option dependency=TYPE:ID",
}
#: The states of jobs, by the letters of qstat, in the words that all schedulers share.
_STATES = {
    "Q": "PENDING", "H": "HELD", "W": "PENDING", "T": "PENDING", "R": "RUNNING",
    "E": "COMPLETING", "S": "SUSPENDED", "U": "SUSPENDED", "M": "UNKNOWN", "B": "RUNNING",
}  # fmt: skip
#: Exit statuses from here on up are 256 and the number of the signal that ended the script.
_SIGNAL_STATUS, _SIGTERM_STATUS = 256, 271
_UNKNOWN = re.compile("Unknown Job Id", re.I)
_NO_CONTACT = re.compile("cannot connect|connection refused|timed out|communication failure", re.I)


def _directives(job: Job) -> list[str]:
    cores, ranks = job.cpus_per_task or 1, job.tasks_per_node or job.gpus_per_node or 1
    chunk = f"{job.nodes}:ncpus={cores * ranks}:mpiprocs={ranks}"
    chunk += f":ngpus={job.gpus_per_node}" * bool(job.gpus_per_node)
    chunk += "".join(f":{resource}" for resource in [job.options.get("select")] if resource)
    hours, rest_s = divmod(job.limit_s, 3600)
    return [
        f"-N {job_name(job)}",
        f"-l select={chunk}",
        f"-l place={job.options.get('place', 'scatter')}",
        f"-l walltime={hours:02}:{rest_s // 60:02}:{rest_s % 60:02}",
        f"-r {'y' if job.max_restarts else 'n'}",
        "-j oe",
    ]


def _parse_id(reply: str) -> str:
    match = re.search(r"^(\d+\.\S+)$", reply, re.M)
    return match[1] if match else ""


def job_attributes(job: JobId) -> dict[str, str]:
    """Return the attributes that PBS shows of a job; empty if it has forgotten the job.

    Raises NoAnswerError, or HpctrainError with the error text of PBS.
    """
    require_command("qstat")
    process = run_command(["qstat", "-x", "-f", str(job)])
    if _UNKNOWN.search(process.stderr):
        return {}
    if process.returncode:
        error_type = NoAnswerError if _NO_CONTACT.search(process.stderr) else HpctrainError
        raise error_type(f"qstat does not show jobs: {process.stderr.strip()}")
    return parse_attributes(process.stdout)


def parse_attributes(text: str) -> dict[str, str]:
    """Return the attributes in the output of `qstat -f`."""
    # A long value goes on in lines after a tab.
    return dict(re.findall(r"^ {4}([\w.]+) = (.*)$", text.replace("\n\t", ""), re.M))


def _query(job: JobId) -> list[JobState]:
    attributes = job_attributes(job)
    if not attributes:
        return [JobState(str(job), "UNKNOWN", FORGOTTEN_REASON.replace("Slurm", "PBS"))]
    letter, status = attributes.get("job_state", ""), attributes.get("Exit_status", "")
    state, code = _STATES.get(letter, letter or "UNKNOWN"), ""
    if letter == "F":
        number = int(status) if status.lstrip("-").isdigit() else None
        state = {0: "COMPLETED", _SIGTERM_STATUS: "CANCELLED", None: "CANCELLED"}.get(
            number, "FAILED"
        )
        is_signal = number is not None and number >= _SIGNAL_STATUS
        code = f"0:{number - _SIGNAL_STATUS}" if is_signal and number else f"{status}:0"
    hosts = re.findall(r"(?:^|\+)([^/+]+)", attributes.get("exec_host", ""))
    host, _, path = attributes.get("Output_Path", "").partition(":")
    return [
        JobState(
            str(job),
            state,
            attributes.get("comment", "") if state in ("PENDING", "HELD") else "",
            elapsed=attributes.get("resources_used.walltime", ""),
            nodes=",".join(dict.fromkeys(hosts)),
            exit_code=code if status else "",
            log=path or host,
        )
    ]


PBS = Dialect(
    name="pbs",
    title="PBS",
    submit=("qsub",),
    cancel=("qdel",),
    sentinel="#PBS",
    id_variable="PBS_JOBID",
    folder_line='cd "${PBS_O_WORKDIR:-.}" || exit 1',
    shell="qsub -I",
    has_environment=False,
    options=_OPTIONS,
    resources=("select", "place"),
    reserved=_RESERVED,
    bad_in_folder=":",
    directives=_directives,
    # A job writes FOLDER/ID.OU while it runs.
    output_options=lambda folder: ["-k", "doe", "-o", f"{folder.absolute()}/"],
    log_pattern=lambda job: f"{job.partition('.')[0]}.*OU",
    parse_id=_parse_id,
    query=_query,
)
