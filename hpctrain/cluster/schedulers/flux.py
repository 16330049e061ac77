"""Flux, as the manual pages of flux-core have it: flux batch, jobs, cancel, and their replies."""

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

_VALUES = ("queue", "bank", "dependency", "requires", "begin-time", "urgency", "setopt", "setattr",
           "flags", "conf", "broker-opts", "env", "env-remove", "rlimit", "dump")  # fmt: skip
_OPTIONS = {
    **{name: f"--{name}={{}}" for name in _VALUES},
    "account": "--bank={}",
    "exclusive": "--exclusive",
    "unbuffered": "--unbuffered",
}
_OWN_FOLDER = "the output goes to the run's folder"
_NO_PROPERTY = (
    "it is no property of a job; call flux batch with the output of `hpctrain flux render`"
)
_RESERVED = {
    "nodes": "use --nodes",
    "nslots": "use --ranks or --tasks-per-node",
    "cores-per-slot": "use --cpus-per-task",
    "gpus-per-slot": "use --gpus-per-node",
    "time-limit": "use --time",
    "job-name": "use --job-name",
    "signal": "use --warn-s",
    "cwd": "a job runs in the folder from which it was submitted",
    **dict.fromkeys(("output", "error"), _OWN_FOLDER),
    **dict.fromkeys(("wrap", "dry-run", "debug", "quiet", "verbose", "input"), _NO_PROPERTY),
}
#: The states of jobs in the words that all schedulers share.
_STATES = {"DEPEND": "PENDING", "PRIORITY": "PENDING", "SCHED": "PENDING", "RUN": "RUNNING",
           "CLEANUP": "COMPLETING", "CANCELED": "CANCELLED"}  # fmt: skip
_FORMAT = "{status}|{returncode}|{runtime!H}|{nodelist}|{exception.type}"
_NO_CONTACT = re.compile("unable to connect|no such file or directory|timed out|broken pipe", re.I)


def _directives(job: Job) -> list[str]:
    ranks = job.nodes * (job.tasks_per_node or job.gpus_per_node or 1)
    return [
        f"--job-name={job_name(job)}",
        f"--nodes={job.nodes}",
        f"--nslots={ranks}",
        f"--cores-per-slot={job.cpus_per_task or 1}",
        *["--gpus-per-slot=1"] * bool(job.gpus_per_node),
        f"--time-limit={job.limit_s}s",
    ]


def _parse_id(reply: str) -> str:
    """Return the id in ASCII: `f` begins it as well as the letter that Flux prints."""
    match = re.search(r"^[\u0192f]([1-9A-HJ-NP-Za-km-z]+)$", reply, re.M)
    return f"f{match[1]}" if match else ""


def _query(job: JobId) -> list[JobState]:
    require_command("flux")
    process = run_command(["flux", "jobs", "--no-header", f"--format={_FORMAT}", str(job)])
    fields = process.stdout.strip().split("|")
    if re.search(r"\bunknown\b", process.stderr) and len(fields) < 5:
        return [JobState(str(job), "UNKNOWN", FORGOTTEN_REASON.replace("Slurm", "Flux"))]
    if process.returncode or len(fields) != 5:
        error_type = NoAnswerError if _NO_CONTACT.search(process.stderr) else HpctrainError
        raise error_type(f"flux jobs does not show jobs: {process.stderr.strip()}")
    status, code, elapsed, nodes, exception = fields
    state = _STATES.get(status, status)
    reason = status.lower() if state == "PENDING" else exception
    signal = code.startswith("-")
    exit_code = f"0:{code[1:]}" if signal else f"{code}:0" if code else ""
    return [JobState(str(job), state, reason, elapsed=elapsed, nodes=nodes, exit_code=exit_code)]


FLUX = Dialect(
    name="flux",
    title="Flux",
    submit=("flux", "batch"),
    cancel=("flux", "cancel"),
    sentinel="# flux:",
    id_variable="FLUX_ENCLOSING_ID",
    folder_line="",
    shell="flux alloc -N 1",
    has_environment=True,
    options=_OPTIONS,
    resources=(),
    reserved=_RESERVED,
    bad_in_folder="{}",
    directives=_directives,
    output_options=lambda folder: [f"--output={folder.absolute()}/flux-{{{{id}}}}.out"],
    log_pattern=lambda job: f"flux-?{job[1:]}.out",
    parse_id=_parse_id,
    query=_query,
)
