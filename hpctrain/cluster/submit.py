"""Jobs given to Slurm, and what became of them: of Slurm's word, and of the run's own files.

A run's folder holds beside what `hpctrain train` writes
job.sbatch      what was submitted last
jobs.json       the ids of its jobs, the latest last
slurm-ID.out    what each of them said
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain import launchers, rundir
from hpctrain.cluster import sbatch
from hpctrain.cluster.reasons import explained
from hpctrain.errors import HpctrainError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCRIPT, JOBS = "job.sbatch", "jobs.json"
LIMIT_S = 120.0  #: a busy controller answers late
POLL_S = 10.0
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT", "UNKNOWN",
)  # fmt: skip
_ABSENT = (
    "no {command} on this PATH, so no Slurm: call this on a login node of the cluster. Here, "
    "`hpctrain slurm render` prints the script, and `hpctrain launch -n 4 train ...` starts ranks"
)
# In what sbatch says, words that stand for an option
_MEANT = {
    "account": "account", "constraint": "constraint", "cpu count": "cpus-per-task",
    "feature": "constraint", "generic resource": "gres", "gres": "gpus-per-node",
    "node configuration": "nodes", "node count": "nodes", "partition": "partition", "qos": "qos",
    "reservation": "reservation", "time limit": "time",
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """What Slurm says of a job, or of one task of an array."""

    job: str  #: 17, or 17_2 for a task of an array
    state: str  #: PENDING, RUNNING, COMPLETED ...; UNKNOWN once Slurm has forgotten it
    reason: str = ""
    restarts: int | None = None
    elapsed: str = ""
    nodes: str = ""


def submit(text: str, folder: Path, options: Sequence[str] = ()) -> int:
    """Give the script `text` to sbatch and return the job's id; keep both in `folder`.

    `options` are words for sbatch. The job runs in the current folder, and finds this Python's
    `hpctrain` first. Raises UsageError in a rank of another job, where there is no Slurm, where
    `folder` cannot be made, or with sbatch's own words.
    """
    _must_have("sbatch")
    here = launchers.launched(os.environ)
    if here.size > 1:
        raise UsageError(f"this is rank {here.rank} of {here.size}: each would submit a job")
    _must_be_found_again()
    made = _made(folder)
    known = jobs_of(folder)
    line = ["sbatch", "--parsable", *_output(text, folder), *options]
    # For sbatch a variable goes before a line of the script, which was asked for and checked.
    done = _run(line, text, without=sbatch.variables(_options(text)))
    if done.returncode:
        if made:
            folder.rmdir()
        raise UsageError(refusal(done.stderr, text))
    job = _id_in(done.stdout)
    (folder / SCRIPT).write_text(text)
    rundir.write_json(folder / JOBS, {"jobs": [*known, job]})
    return job


def _must_be_found_again() -> None:
    """Raise UsageError where sbatch would ask another cluster than scontrol does."""
    chosen = os.environ.get("SBATCH_CLUSTERS")
    if chosen and chosen != os.environ.get("SLURM_CLUSTERS"):
        raise UsageError(
            f"SBATCH_CLUSTERS={chosen} is read by sbatch alone, and `status` would ask another "
            f"cluster: export SLURM_CLUSTERS={chosen} as well"
        )


def _made(folder: Path) -> bool:
    """Make `folder`; return whether it is new."""
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be made: {error.strerror}") from None
    return new


def _id_in(said: str) -> int:
    """Return the job's id in what sbatch says; some sites let it say more."""
    found = re.search(r"^(\d+)(;\S*)?$", said, re.M)
    if found is None:
        raise HpctrainError(f"sbatch took the script, and has not told the job's id: {said!r}")
    return int(found[1])


def _output(text: str, folder: Path) -> list[str]:
    """Return the option that sends what a job says into `folder`, unless the script has one."""
    given = _options(text)
    if "output" in given:
        return []
    out = str(folder.absolute() / "slurm-").replace("%", "%%")
    return [f"--output={out}{'%A_%a' if 'array' in given else '%j'}.out"]


def _options(text: str) -> set[str]:
    return {found[1] for found in re.finditer(r"^#SBATCH --([a-z-]+)", text, re.M)}


def refusal(said: str, text: str) -> str:
    """Return sbatch's words, and the lines of the script that they may be about."""
    low, lines = said.lower(), []
    for number, line in enumerate(text.splitlines(), start=1):
        found = re.match(r"#SBATCH --([a-z-]+)(?:=(.*))?", line)
        if found and _is_meant(found[1], found[2] or "", low):
            lines.append(f"  line {number}: {line}")
    head = f"sbatch refuses the job:\n{said.strip()}"
    return "\n".join([head, *(["that may be about"] if lines else []), *lines])


def _is_meant(option: str, value: str, said: str) -> bool:
    by_value = len(value) > 3 and value.lower() in said
    by_words = any(words in said and meant == option for words, meant in _MEANT.items())
    return by_value or by_words or option in re.findall("[a-z][a-z-]*", said)


def jobs_of(folder: Path) -> list[int]:
    """Return the ids of the jobs of a run, the latest last."""
    path = folder / JOBS
    try:
        return [int(job) for job in json.loads(path.read_text())["jobs"]] if path.exists() else []
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f'{path} is damaged: expected {{"jobs": [17, ...]}}; write the ids anew, or remove it'
        ) from None


def named(name: str) -> list[int]:
    """Return the jobs of this name that have not ended, the latest last."""
    done = _run(["squeue", "--noheader", f"--user={getpass.getuser()}", f"--name={name}",
                 "--format=%A"])  # fmt: skip
    if done.returncode:
        raise HpctrainError(f"squeue does not tell of jobs: {done.stderr.strip()}")
    return sorted({int(line) for line in done.stdout.split()})


def ask(job: int) -> list[State]:
    """Return what Slurm says of `job`, for an array of each of its tasks.

    The controller forgets jobs some minutes after their end; then accounting is asked.
    """
    _must_have("scontrol")
    done = _run(["scontrol", "--oneliner", "show", "job", str(job)])
    if done.returncode == 0:
        return _tasks(done.stdout)
    if "Invalid job id" not in done.stderr:
        raise HpctrainError(f"scontrol does not tell of the job: {done.stderr.strip()}")
    return _accounted(job) or [State(str(job), "UNKNOWN", "Slurm has forgotten it")]


def heard(job: int) -> list[State]:
    """Return what `ask` does; a controller that does not answer says nothing new."""
    try:
        return ask(job)
    except UsageError:
        raise
    except HpctrainError as error:
        return [State(str(job), "NO ANSWER", str(error))]


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
            found.append(State(job, fields["JobState"], reason, restarts, fields["RunTime"], names))
    return sorted(found, key=lambda state: [int(n) for n in re.findall(r"\d+", state.job)])


def _accounted(job: int) -> list[State]:
    if shutil.which("sacct") is None:
        return []
    line = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}"]
    done = _run([*line, "--format=JobID,State,Elapsed,NodeList"])
    rows = [row.split("|") for row in done.stdout.splitlines() if row.count("|") == 3]
    # "CANCELLED by 1000"
    return [State(i, s.split()[0], elapsed=e, nodes=n) for i, s, e, n in rows if "+1" not in i]


def status(folder: Path) -> list[dict[str, Any]]:
    """Return a row for the latest job of a run, and for each before it that has not ended.

    Of an array a row per task. Raises UsageError where no job was submitted from `folder`.
    """
    jobs = jobs_of(folder)
    if not jobs:
        raise UsageError(
            f"{folder} holds no {JOBS}: expected the folder of a run that `hpctrain slurm submit` "
            "made"
        )
    states = [
        state for job in jobs for state in heard(job) if job == jobs[-1] or state.state not in ENDED
    ]
    return [{**vars(state), **told(_run_of(folder, state))} for state in states]


def _run_of(folder: Path, state: State) -> Path:
    """Return the folder of the run that a job, or a task of an array, makes.

    It is where the script says, which of a trial of `hpctrain scale` is not `folder`.
    """
    text = (folder / SCRIPT).read_text()
    named = re.search(r"^run=(.*)$", text, re.M)
    run = Path(shlex.split(named[1])[0].removesuffix("/nodes-$nodes")) if named else folder
    # seen from the folder of submission; not there where it was moved
    folder = run if run.is_absolute() and run.is_dir() else folder
    sizes = re.search(r"^sizes=\(([\d ]+)\)$", text, re.M)
    task = re.fullmatch(r"\d+_(\d+)", state.job)
    if not (sizes and task):
        return folder
    return folder / f"nodes-{sizes[1].split()[int(task[1])]}"


def told(run: Path) -> dict[str, Any]:
    """Return what the files of a run tell of it so far."""
    summary, rows = rundir.read_summary(run) or {}, rundir.rows(run)
    last = rows[-1] if rows else {}
    asked = _asked(run)
    keys = ("step", "epoch", "train_loss", "test_accuracy", "samples_per_s")
    return {
        "run": str(run),
        "status": summary.get("status"),
        "reason_of_run": summary.get("reason"),
        "steps": asked.get("steps"),
        "epochs": asked.get("epochs"),
        **{key: last.get(key) for key in keys},
    }


def _asked(run: Path) -> dict[str, Any]:
    """Return `[run]` of the resolved recipe; empty before training begins."""
    path = run / rundir.RECIPE
    table: dict[str, Any] = tomllib.loads(path.read_text()).get("run", {}) if path.exists() else {}
    return table


def wait(folders: Sequence[Path], limit_s: float) -> list[dict[str, Any]]:
    """Return the status of all jobs once they have ended, or after `limit_s`."""
    deadline, pause = time.monotonic() + limit_s, 0.5
    while True:
        rows = [row for folder in folders for row in status(folder)]
        left = deadline - time.monotonic()
        if left <= 0 or all(row["state"] in ENDED for row in rows):
            return rows
        time.sleep(min(pause, left))
        pause = min(2 * pause, POLL_S)


def meaning(row: dict[str, Any]) -> str:
    """Return why a job is where it is: the run's own reason, or Slurm's with what it means."""
    if row["state"] in ENDED and row["reason_of_run"]:
        return str(row["reason_of_run"])
    return explained(row["reason"])


def _must_have(command: str) -> None:
    if shutil.which(command) is None:
        raise UsageError(_ABSENT.format(command=command))


def _run(
    line: Sequence[str], text: str = "", without: Collection[str] = ()
) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    kept = {name: value for name, value in os.environ.items() if name not in without}
    environ = {**kept, "PATH": path}
    try:
        return subprocess.run(
            line, input=text, env=environ, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise HpctrainError(f"{line[0]} has not answered within {LIMIT_S:.0f} s") from None
