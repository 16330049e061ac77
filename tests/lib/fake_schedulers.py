"""Simulated PBS and Flux: commands that read the options of the manual pages, and refuse others.

Each command is this file under another name. Jobs are kept in the folder FAKE_JOBS, a JSON file for
each; `run_job` runs one as its scheduler would.
"""

from __future__ import annotations

import argparse
import getopt
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

QSUB_OPTIONS = "a:A:c:C:e:fhIj:J:k:l:m:M:N:o:p:P:q:r:R:S:u:v:VW:Xz"
#: What the value of an option of qsub looks like.
QSUB_VALUES = {
    "-l": r"select=\d+(:\w+=\w+)+|place=(free|pack|scatter|vscatter)(:excl|:exclhost|:shared)?"
    r"|walltime=\d\d+:\d\d:\d\d|(?!nodes|ncpus)\w+=\S+",
    "-N": r"[A-Za-z0-9_+.-]{1,236}",
    "-r": "[yn]",
    "-j": "oe|eo|n",
    "-k": "[eodn]+",
    "-W": r"(depend|group_list|umask|sandbox|run_count)=\S+",
}
FLUX_BATCH = {
    "nodes", "nslots", "cores-per-slot", "gpus-per-slot", "time-limit", "job-name", "queue", "bank",
    "dependency", "output", "error", "setopt", "setattr", "urgency", "requires", "begin-time",
    "conf", "broker-opts", "env", "env-remove", "rlimit", "flags", "dump",
}  # fmt: skip
FLUX_FIELDS = {"status", "returncode", "runtime!H", "nodelist", "exception.type"}


def jobs() -> Path:
    """Return the folder of jobs."""
    return Path(os.environ["FAKE_JOBS"])


def read_job(job: str) -> dict:
    """Return what is kept of a job; end this command where there is none."""
    path = jobs() / f"{job.replace(chr(0x192), 'f')}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save_job(job: str, **values: object) -> None:
    """Change what is kept of a job."""
    (jobs() / f"{job}.json").write_text(json.dumps(read_job(job) | values))


def fail(message: str, code: int = 1) -> None:
    """End this command."""
    sys.exit(print(message, file=sys.stderr) or code)


def await_ranks() -> None:
    """Wait until a rank handles signals: USR1 would end it before."""
    while not (jobs().parent / "up").exists():
        time.sleep(0.01)


def qsub_options(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the options and the arguments of a command line of qsub, or of a directive."""
    try:
        pairs, rest = getopt.getopt(words, QSUB_OPTIONS)
    except getopt.GetoptError as error:
        fail(f"qsub: {error}", 2)
    options: dict[str, list[str]] = {}
    for name, value in pairs:
        if not re.fullmatch(QSUB_VALUES.get(name, ".*"), value):
            fail(f"qsub: illegal {name} value: {value}", 2)
        options.setdefault(name, []).append(value)
    return options, rest


def qsub(words: list[str]) -> None:
    """Queue the script of a file or of stdin."""
    options_here, files = qsub_options(words)
    text = Path(files[0]).read_text() if files else sys.stdin.read()
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("#PBS"):
            more, rest = qsub_options(shlex.split(line[4:]))
            if rest:
                fail(f"qsub: directive error: {line}", 2)
            for name, values in more.items():
                options.setdefault(name, []).extend(values)
        elif line and not line.startswith("#"):
            break
    options |= options_here
    if options.get("-q") == ["closed"]:
        fail("qsub: Unknown queue", 170)
    queue(f"{101 + len(list(jobs().iterdir()))}.pbs_1", options, text, "Q")


def queue(job: str, options: dict, text: str, state: str) -> None:
    """Keep a job, and print its id."""
    folder = str(Path.cwd())
    save_job(job, options=options, script=text, state=state, folder=folder, status="")
    print(job if "." in job else job.replace("f", chr(0x192), 1))


def qstat(words: list[str]) -> None:
    """Print the attributes of a job; long values go on in lines that begin with a tab."""
    *flags, job = words
    if flags != ["-x", "-f"]:
        fail(f"qstat: illegal option {flags}", 2)
    if (jobs().parent / "away").exists():
        fail("qstat: cannot connect to server pbs_1 (errno=111)", 255)
    facts = read_job(job)
    if facts and facts["state"] == "R":
        await_ranks()
    if not facts:
        fail(f"qstat: Unknown Job Id {job}", 153)
    print(f"Job Id: {job}\n    Job_Name = {facts['options']['-N'][-1]}")
    print(f"    job_state = {facts['state']}")
    limit = next(v for v in facts["options"]["-l"] if v.startswith("walltime="))
    print(f"    Resource_List.{facts.get('limit', limit.replace('=', ' = '))}")
    print(
        "    exec_host = n1/0*4+n2/0*4\n    comment = Not Running: Insufficient\n\t amount of ncpus"
    )
    print(f"    Exit_status = {facts['status']}\n" * (facts["status"] != ""), end="")


def qdel(words: list[str]) -> None:
    """End jobs."""
    for job in words:
        save_job(job, state="F", status=271)


def flux(words: list[str]) -> None:
    """Run a subcommand of flux."""
    if words[0] == "--parent":
        words = words[1:]
    name, *words = words
    if name == "batch":
        flux_batch(words)
    elif name == "jobs":
        flux_jobs(words)
    elif name == "cancel":
        for job in words:
            save_job(job, state="CANCELED", status=143)
    elif (name, *words) == ("job", "timeleft"):
        await_ranks()
        print((jobs().parent / "left").read_text())
    elif (name, *words) == ("resource", "list", "-no", "{nnodes}"):
        print(2)
    elif name == "run":
        start(words, {"-N", "-n", "-c", "-g", "-o"})
    else:
        fail(f"flux: unknown command {name} {words}")


def flux_batch(words: list[str]) -> None:
    """Queue the script of a file or of stdin; its directives are grouped lines of one prefix."""
    parser = argparse.ArgumentParser("flux batch", allow_abbrev=False)
    for option in sorted(FLUX_BATCH):
        parser.add_argument(f"--{option}", action="append")
    for flag in ("exclusive", "unbuffered"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("script", nargs="?")
    options_here = parser.parse_args(words)
    text = Path(options_here.script).read_text() if options_here.script else sys.stdin.read()
    directives, is_over = [], False
    for line in text.splitlines():
        if line.startswith("# flux:") and is_over:
            fail(f"flux-batch: ERROR: orphan directive: {line}")
        is_over = is_over or bool(line and not line.startswith("#"))
        directives += shlex.split(line[7:], comments=True) if line.startswith("# flux:") else []
    options = vars(parser.parse_args(directives))
    options |= {name: value for name, value in vars(options_here).items() if value}
    if options["queue"] == ["closed"]:
        fail("flux-batch: ERROR: [Errno 22] Invalid queue 'closed' specified")
    if not re.fullmatch(r"\d+(\.\d+)?[smhd]?", options["time_limit"][0]):
        fail("flux-batch: error: argument --time-limit: invalid Flux standard duration")
    queue(f"f2Qk{1 + len(list(jobs().iterdir()))}", options, text, "SCHED")


def flux_jobs(words: list[str]) -> None:
    """Print fields of a job."""
    header, form, job = words
    if (jobs().parent / "away").exists():
        fail("flux-jobs: ERROR: Unable to connect to Flux: No such file or directory")
    fields = set(re.findall(r"\{([^}]+)\}", form))
    if header != "--no-header" or not form.startswith("--format=") or not fields <= FLUX_FIELDS:
        fail(f"flux-jobs: error: {words}", 2)
    facts = read_job(job)
    if not facts:
        fail(f"flux-jobs: ERROR: JobID {job} unknown")
    values = {"status": facts["state"], "returncode": facts["status"], "nodelist": "n[1-2]"}
    print(re.sub(r"\{([^}]+)\}", lambda m: str(values.get(m[1], "")), form[len("--format=") :]))


VENDORS = {
    "openmpi": ("mpiexec (Open MPI) 5.0.7", {"-n", "--map-by", "--bind-to", "-x", "--hostfile"}),
    "hydra": ("HYDRA build details:", {"-n", "-ppn", "--hostfile"}),
    "pals": ("mpiexec version 1.6", {"-n", "-ppn", "--hostfile", "--cpu-bind", "--depth"}),
}


def mpiexec(words: list[str]) -> None:
    """Start a rank as the mpiexec of the MPI in FAKE_MPI does."""
    version, options = VENDORS[os.environ.get("FAKE_MPI", "pals")]
    if words == ["--version"]:
        sys.exit(print(version))
    start(words, options)


def start(words: list[str], options: set[str]) -> None:
    """Note the options, each of which has a value, and become the command behind them."""
    count = 0
    while words[count].startswith("-"):
        if words[count] not in options:
            fail(f"unrecognized option {words[count]}", 2)
        count += 2
    with (jobs().parent / "starts").open("a") as file:
        pairs = zip(words[:count:2], words[1:count:2], strict=True)
        print(*(word for pair in pairs if pair[0] != "-x" for word in pair), file=file)
    if words[count] != "bash":  # records of ranks
        os.execvp(words[count], words[count:])


def run_job(job: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a queued job to its end, with the variables that its scheduler sets; `folder` has bin."""
    facts = json.loads((folder / "jobs" / f"{job}.json").read_text())
    spooled = folder / "spool.sh"
    spooled.write_text(facts["script"])
    spooled.chmod(0o755)
    (folder / "nodes").write_text("n1\nn1\nn2\nn2\n")
    (folder / "left").write_text(environ.pop("left", "3600"))
    own = {"FLUX_ENCLOSING_ID": job.replace("f", chr(0x192), 1)}
    if "." in job:
        own = {"PBS_JOBID": job, "PBS_NODEFILE": str(folder / "nodes")}
        own |= {"PBS_O_WORKDIR": facts["folder"], "PBS_ENVIRONMENT": "PBS_BATCH"}
    reference = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "FAKE_JOBS": str(folder / "jobs")}
    state = {"state": "R" if "." in job else "RUN"}
    (folder / "jobs" / f"{job}.json").write_text(json.dumps(facts | state))
    completed = subprocess.run(
        [spooled], cwd=facts["folder"] if "." not in job else "/", env=reference | own | environ,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    state = "F" if "." in job else "FAILED" if completed.returncode else "COMPLETED"
    outcome = {"state": state, "status": completed.returncode}
    (folder / "jobs" / f"{job}.json").write_text(json.dumps(facts | outcome))
    return completed


if __name__ == "__main__":
    globals()[Path(sys.argv[0]).name](sys.argv[1:])
