"""hpctrain pbs and flux, on simulated schedulers that read the options of the manual pages.

`PYTHONPATH=tests python tests/cluster/test_schedulers.py` writes tests/golden/schedulers anew.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import fake_schedulers
import pytest
from click.testing import CliRunner
from scripts import fake

import hpctrain as ht
from hpctrain.cli import hpctrain
from hpctrain.cluster.schedulers.scheduler import SCHEDULERS
from hpctrain.cluster.slurm.job import Job
from hpctrain.core.errors import HpctrainError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden/schedulers"
#: A job of each scheduler, with its own options.
OPTIONS = {
    "pbs": {"account": "m1", "l": "filesystems=home:eagle", "select": "system=polaris"},
    "flux": {"account": "m1", "queue": "debug", "exclusive": ""},
}
NAMES = tuple(OPTIONS)
IDS = {"pbs": ("101.pbs_1", "102.pbs_1"), "flux": ("f2Qk1", "f2Qk2")}
#: A rank. At its first step it is asked to stop, is killed or does what a row says.
RANK = """
out=${@: -2:1}; mkdir -p $out/checkpoints/step-1
trap 'asked=1' USR1
touch ${FAKE_JOBS%/*}/up
sleep 0.02 # the time of a file is coarser than that of a clock
[ -z "$SAVED" ] || touch $out/checkpoints/step-1/manifest.json
[ "$ASK" != term ] || kill -TERM $PPID
for ((i = 0; i < 1500; i++)); do [ -z "$asked" ] && [ -n "$ASK" ] || break; sleep 0.02; done
says=$SAYS; [ -z "$asked" ] || says="stopped 75"
[ -z "$says" ] ||
    printf '{"status": "%s", "exit_code": %s, "reason": "why"}' $says >$out/summary.json
exit $CODE
"""


def script(name: str) -> str:
    job = Job("my runs/it's.toml", nodes=2, gpus_per_node=4, cpus_per_task=8, time="1-2:30:00",
              options=OPTIONS[name], arguments=("--set", "run.epochs=3"))  # fmt: skip
    return SCHEDULERS[name].render(job, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_kept_files_are_what_is_rendered(name):
    text = script(name)
    assert (GOLDEN / f"job.{name}").read_text() == text
    assert len(text.splitlines()) <= 50
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    if shutil.which("shellcheck"):
        command = ["shellcheck", "--shell=bash", "-"]
        checked = subprocess.run(command, input=text, capture_output=True, text=True, timeout=100)
        assert checked.stdout == ""


def test_a_profile_of_a_site():
    """It gives ranks, cores and options where the command line has none."""
    text = output_of("pbs", "render", "digits", "--nodes", "2", "--site", "aurora",
                     "--option", "queue=debug")  # fmt: skip
    for line in (
        "#PBS -l select=2:ncpus=96:mpiprocs=12",
        "#PBS -q debug",
        "#PBS -l filesystems=home:flare",
        "# Read from public documentation, not run there:",
        "module load frameworks || exit 1",
        "export HPCTRAIN_LAUNCHER=mpiexec",
    ):
        assert line in text.splitlines()
    assert "--ranks-per-node=12 --cores=8" in text and "site.env" not in text
    assert "-q prod" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.sample(1)
def test_a_profile_starts_its_ranks_with_its_launcher(tmp_path):
    """On Aurora the mpiexec of PALS, after the site's modules."""
    fake(tmp_path, "module", f'echo "$@" >{tmp_path}/modules')
    job = submit("pbs", "--site", "aurora")
    environ = {"SAYS": "done 0", "CODE": "0", "FAKE_MPI": "pals"}
    completed = fake_schedulers.run_job(job, tmp_path, **environ)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert Path("modules").read_text() == "load frameworks\n"
    words = "-n 4 -ppn 2 --cpu-bind depth --depth 8 --hostfile"
    assert (tmp_path / "starts").read_text().startswith(words)


def test_options_of_a_profile_are_checked(tmp_path):
    Path("s.toml").write_text('title = "x"\nscheduler = "pbs"\n[cpu]\noptions.quee = "a"')
    with pytest.raises(UsageError, match="did you mean 'queue'"):
        output_of("pbs", "render", "digits", "--site", "s.toml")


@pytest.fixture(autouse=True)
def cluster(tmp_path, monkeypatch):
    """Put the commands of both schedulers, and an hpctrain whose ranks are RANK, on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_JOBS", str(tmp_path / "jobs"))
    (tmp_path / "jobs").mkdir()
    text = Path(fake_schedulers.__file__).read_text()
    for name in ("qsub", "qstat", "qdel", "flux", "mpiexec"):
        fake(tmp_path, name, f"#!{sys.executable} -IS\n{text}")
    launch = f'[ "$1" != launch ] || exec {sys.executable} -m hpctrain "$@"'
    fake(tmp_path, "hpctrain", f"#!/bin/bash\n{launch}\n{RANK}")


def output_of(*words: str) -> str:
    """Return what `hpctrain WORDS` prints."""
    result = CliRunner().invoke(hpctrain, list(words), standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


def submit(name: str, *words: str) -> str:
    """Submit a job with its run in run/; return its id."""
    options = ["--nodes", "2", "--tasks-per-node", "2", "--out", "run"]
    job, folder = output_of(name, "submit", "digits", *options, *words).split()
    assert folder in ("run", "b")
    return job


def states(*words: str) -> list[str]:
    return [row["state"] for row in json.loads(output_of("slurm", "status", "--json", *words))]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_from_its_submission_to_its_end(name, tmp_path):
    """Its state, its output, its script and its ids are those of its folder, for all commands."""
    job = submit(name, "--option", "account=m1", "--cpus-per-task", "3")
    assert job == IDS[name][0] and states("run") == ["PENDING"]
    with pytest.raises(UsageError, match=rf"its job {job} is PENDING.*dependency=afterany:{job}"):
        submit(name)
    completed = fake_schedulers.run_job(job, tmp_path, SAYS="done 0", CODE="0", SAVED="1")
    assert (completed.returncode, completed.stderr) == (0, "")
    path = tmp_path / "run" / {"pbs": f"{job}.OU", "flux": f"flux-{chr(0x192)}{job[1:]}.out"}[name]
    path.write_text("one\ntwo\n")
    (row,) = ht.slurm.status("run")
    assert (row["state"], row["status"], row["scheduler"]) == ("COMPLETED", "done", name)
    assert row["log"] == str(path.relative_to(tmp_path)) and row["nodes"] in ("n1,n2", "n[1-2]")
    assert output_of(name, "log", "run") == "one\ntwo\n"
    assert output_of(name, "cancel", "run") == "no unfinished job\n"
    assert (tmp_path / "starts").read_text().split() == {
        "pbs": f"-n 4 -ppn 2 --cpu-bind depth --depth 3 --hostfile {tmp_path}/nodes",
        "flux": "-N 2 -n 4 -c 3",
    }[name].split()
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_file()) == sorted(
        [".began", path.name, f"job.{name}", "jobs.json", "summary.json"]
    )
    (tmp_path / "jobs" / f"{job}.json").unlink()
    assert states("run") == ["UNKNOWN"]
    assert output_of(name, "status", "run", "--wait", "1")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_is_a_job_for_each_member(name, tmp_path):
    """Each submits itself again; called again, those that are done or in the queue are left out."""
    line = (name, "submit", "digits", "--set", "run.seed=1,2", "--out", "s")
    jobs = IDS[name]
    assert output_of(*line) == f"{jobs[0]}  s/seed=1\n{jobs[1]}  s/seed=2\n"
    completed = fake_schedulers.run_job(jobs[0], tmp_path, SAYS="done 0", CODE="0", SAVED="1")
    assert completed.returncode == 0, completed.stdout
    completed = fake_schedulers.run_job(jobs[1], tmp_path, CODE="137", SAVED="1")
    assert "submitted again as" in completed.stdout
    assert states("s") == ["COMPLETED", "PENDING"]
    with pytest.raises(UsageError, match="every member of this sweep is done, or in the queue"):
        output_of(*line)
    cancelled = output_of(name, "cancel", "s")
    assert cancelled.startswith("cancelled: ") and cancelled.count("\n") == 1
    assert output_of(*line).endswith("  s/seed=2\n")
    with pytest.raises(UsageError, match="gets a job for each member of a sweep"):
        output_of(name, "render", *line[2:5])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_job_is_cancelled(name):
    job = submit(name)
    later = submit(name, "--option", f"dependency=afterany:{job}")
    assert output_of(name, "cancel", "run") == f"cancelled: {job}\ncancelled: {later}\n"
    assert states("run") == ["CANCELLED"]
    output_of(name, "submit", "digits", "--out", "run")  # goes on with the run


# variables of the ranks -> what the job says at its end, its exit code, whether another follows
PARTS = {
    "stopped before its time is over": (
        {"ASK": "1", "left": "20", "CODE": "75"},
        "why; submitted again as {} for restart 1 of 20", 0,
    ),
    "a rank is killed": (
        {"CODE": "137", "SAVED": "1"},
        "ranks were lost, or hung; submitted again as {} for restart 1 of 20", 0,
    ),
    "the scheduler ends it": ({"ASK": "term", "CODE": "75"}, "why; {title} says ENDED", 75),
    "the scheduler ends it while its site is set up": (
        {"site": "kill -TERM $$; kill -USR1 $$", "ASK": "1", "CODE": "75"},
        "{title} ended it before its ranks began: to go on submit again, with --out", 75,
    ),
    "a bug": ({"SAYS": "failed 3", "CODE": "3"}, "", 3),
    "done": ({"SAYS": "done 0", "CODE": "0"}, "", 0),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", PARTS)
def test_what_follows_a_part(case, name, tmp_path):
    environ, message, code = PARTS[case]
    Path(name).mkdir()
    Path(name, "site.env").write_text(environ.get("site", ":"))
    job, successor = submit(name, "--warn-s", "30"), IDS[name][1]
    if "left" in environ and name == "pbs":  # another limit than that of the script
        change_limit(tmp_path, job)
    completed = fake_schedulers.run_job(job, tmp_path, **environ)
    assert (completed.returncode, completed.stderr) == (code, ""), completed.stdout
    assert Path("starts").exists() == ("site" not in environ)
    title = SCHEDULERS[name].title
    assert message.format(successor, title=title) in completed.stdout
    follows = "{}" in message
    record = json.loads((tmp_path / "run/jobs.json").read_text())
    assert record == {"scheduler": name, "jobs": [job, successor][: 1 + follows]}
    if follows:
        next_job = json.loads((tmp_path / "jobs" / f"{successor}.json").read_text())
        dependency = {"pbs": "-W", "flux": "dependency"}[name]
        prefix = "depend=" * (name == "pbs")
        assert next_job["options"][dependency] == [f"{prefix}afterany:{job}"]
        assert states("run")[-1] == "PENDING"
        completed = fake_schedulers.run_job(successor, tmp_path, SAYS="done 0", CODE="0")
        assert completed.returncode == 0 and states("run")[-1] == "COMPLETED"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_started_again_after_its_end(name, tmp_path):
    program = ["sh", "-c", "echo $HPCTRAIN_RUN >>parts; [ $(wc -l <parts) = 2 ] || exit 75"]
    options = ["--nodes", "2", "--out", "run"]
    job, _ = output_of(name, "submit", *options, "--", *program).split()
    completed = fake_schedulers.run_job(job, tmp_path)
    successor = f"submitted again as {IDS[name][1]} for restart 1 of 20"
    assert f"on request (of itself); {successor}" in completed.stdout, completed.stderr
    assert fake_schedulers.run_job(IDS[name][1], tmp_path).returncode == 0
    assert Path("parts").read_text() == f"{tmp_path}/run\n" * 2
    assert states("run")[-1] == "COMPLETED" and ht.slurm.status("run")[-1]["status"] == "done"


def change_limit(folder: Path, job: str) -> None:
    """Let PBS report a limit of a minute, as after qalter: less than the warning before its end."""
    path = folder / "jobs" / f"{job}.json"
    facts = json.loads(path.read_text()) | {"limit": "walltime = 00:00:20"}
    path.write_text(json.dumps(facts))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_submitted_by_hand_goes_on_in_its_run(name, tmp_path):
    text = output_of(name, "render", "digits", "--max-restarts", "1")
    command = {"pbs": ["qsub"], "flux": ["flux", "batch"]}[name]
    subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.DEVNULL)
    for job, end, code in zip((*IDS[name], "last"), ("as ", "is enough"), (0, 75), strict=False):
        completed = fake_schedulers.run_job(job, tmp_path, CODE="75", SAYS="stopped 75")
        assert (completed.returncode, completed.stderr) == (code, ""), completed.stdout
        assert end in completed.stdout
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "jobs.json").read_text())["jobs"] == [*IDS[name]]


#: Starts a job whose commands are to answer soon: tests do not wait for the real limits.
HASTE = """
from hpctrain.__main__ import main
from hpctrain.cluster.schedulers import in_job
in_job.batch_job.output.__kwdefaults__["limit_s"], in_job._SUBMIT_LIMIT_S = 8, 1
main()
"""
ENDS_IN = """[ ! -e known ] || exec sleep 200
until [ -e up ]; do sleep 0.02; done
touch known; echo '    Resource_List.walltime = 00:00:{}'"""
AGAIN, UNKNOWN = "why; submitted again as 102.pbs_1", "within 1 s: the next job may be in the queue"
# a command, what it does -> what the job says at its end, how often the command is called
HANGING = {
    "PBS hangs after it has said that the end is near": ("qstat", ENDS_IN.format(20), AGAIN, 1),
    "PBS hangs when the end is near": ("qstat", ENDS_IN.format(31), AGAIN, 2),
    "the next job is perhaps accepted": (
        "qsub",
        "exec sleep 200",
        f"qsub returned no id {UNKNOWN}",
        1,
    ),
    "the next job has no id": ("qsub", "echo welcome", f"qsub returned no id {UNKNOWN}", 1),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", HANGING)
def test_a_server_that_hangs(case, tmp_path):
    """The ranks are asked to stop by the last end that is known, and one job at most follows."""
    command, script, message, count = HANGING[case]
    job = submit("pbs", "--warn-s", "30")
    (tmp_path / "haste.py").write_text(HASTE)
    launch = f'[ "$1" != launch ] || exec {sys.executable} {tmp_path}/haste.py "$@"'
    fake(tmp_path, "hpctrain", f"#!/bin/bash\n{launch}\n{RANK}")
    fake(tmp_path, command, f"cd {tmp_path}; echo >>called\n{script}")
    environ = {"ASK": "1"} if command == "qstat" else {"SAYS": "stopped 75"}
    completed = fake_schedulers.run_job(job, tmp_path, CODE="75", **environ)
    assert message in completed.stdout
    assert Path("called").read_text() == "\n" * count


MPI = {
    "openmpi": "-n 4 --map-by ppr:2:node --bind-to none --hostfile",
    "hydra": "-n 4 -ppn 2 --hostfile",
    "pals": "-n 4 -ppn 2 --cpu-bind depth --depth 1 --hostfile",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("vendor", MPI)
def test_each_mpiexec_gets_its_own_options(vendor, tmp_path):
    job = submit("pbs")
    environ = {"SAYS": "done 0", "CODE": "0", "FAKE_MPI": vendor}
    assert fake_schedulers.run_job(job, tmp_path, **environ).returncode == 0
    assert (tmp_path / "starts").read_text().startswith(MPI[vendor])


# words, what the error says
REFUSED = {
    "pbs --sizes 1,2": "--sizes: PBS has no such jobs here; a task of an array",
    "flux --servers 1 --nodes 2": "--servers: Flux has no such jobs here; the last ranks",
    "pbs --elastic": "--elastic: PBS has no such jobs here; after a loss",
    "flux --min-ranks 1": "--min-ranks: Flux has no such jobs here",
    "pbs --site cpu": "has another scheduler: use `hpctrain slurm`",
    "flux --interactive": "--interactive: asks salloc for nodes; here call `flux alloc -N 1`",
    "pbs --nodes 0": "--nodes: expected 1 or more, seen 0",
    "pbs --option acount=m": "did you mean 'account'",
    "pbs --option l=walltime=1:00:00": "cannot set walltime: use --time",
    "pbs --option l=mem=1gb,select=1": "cannot set select",
    "pbs --option W=depend=afterok:1": "cannot set depend: use --option dependency=TYPE:ID",
    "pbs --option r=n": "--option r: cannot be set: use --max-restarts",
    "pbs --option A": "--option A: expected A=VALUE, seen ''",
    "flux --option exclusive=1": "expected exclusive, without a value, seen '1'",
    "flux --option time-limit=5": "--option time-limit: cannot be set: use --time",
    "flux --option signal=USR1@5": "--option signal: cannot be set: use --warn-s",
    "pbs --option q=$(a)": "since qsub reads the value from a line of the script; seen '$(a)'",
    "flux --option queue=a --option queue=b": "--option queue: expected it once, seen it 2 times",
    "pbs --time 2h": "expected minutes, H:M:S, D-H or D-H:M:S, such as 2:00:00",
    "pbs --time 1:00": "is 60 s, but the stop signal comes 120 s before",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_translated_is_refused(words):
    name, *options = words.split()
    with pytest.raises(UsageError) as error:
        output_of(name, "render", "digits", *options)
    assert REFUSED[words] in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_faults_of_the_scheduler(name, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"refuses the job:\n.*queue"):
        submit(name, "--option", "queue=closed")
    assert not Path("run").exists()
    submit(name)
    Path("away").touch()
    assert states("run") == ["NO ANSWER"]
    with pytest.raises(HpctrainError, match=r"nothing was cancelled: .*connect"):
        output_of(name, "cancel", "run")
    with pytest.raises(UsageError, match=r"holds jobs of .*, expected one of Slurm"):
        output_of("slurm", "submit", "digits", "--out", "run")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(UsageError, match=rf"`hpctrain {name} render` prints the script"):
        submit(name, "--out", "b")


@pytest.mark.parametrize("name", NAMES)
def test_help_says_that_nobody_has_run_it(name):
    assert "not run on a real one" in output_of(name, "--help")
    assert "not run on a real one" in script(name)


if __name__ == "__main__":
    for name in NAMES:
        GOLDEN.mkdir(parents=True, exist_ok=True)
        (GOLDEN / f"job.{name}").write_text(script(name))
