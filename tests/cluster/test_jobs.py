"""ht.slurm, `slurm log` and `slurm cancel`: on a simulated Slurm with a file per job."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from scripts import SENT, fake

import hpctrain as ht
from hpctrain.cli import hpctrain
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.run_files import run_folder

COMMANDS = {
    "scontrol": """[ ! -e silent ] || { echo 'Unable to contact slurm controller' >&2; exit 1; }
echo "JobId=$4 JobState=$(cat states/$4) Reason=None RunTime=00:01:02 NodeList=n1 StdOut=/none" """,
    "sacct": "exit 1",
    "scancel": """echo "$@" >cancelled
for job; do echo CANCELLED >states/$job; done""",
    "sbatch": "cat >script; echo RUNNING >states/19; echo 19",
}


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    Path("states").mkdir()
    for name, script in COMMANDS.items():
        fake(tmp_path, name, script)


def make_run(folder: str, **states: str) -> Path:
    """Make the folder of a run with jobs in these states, as in job17="RUNNING"."""
    jobs = {int(name.removeprefix("job")): state for name, state in states.items()}
    path = Path(folder)
    path.mkdir(parents=True)
    (path / "job.sbatch").write_text(f"run={folder}\n")
    run_folder.write_json(path / "jobs.json", {"jobs": list(jobs)})
    for job, state in jobs.items():
        Path("states", str(job)).write_text(state)
        (path / f"slurm-{job}.out").write_text(f"first of {job}\nsecond of {job}\n")
    return path


def call(*words: str) -> str:
    result = CliRunner().invoke(hpctrain, ["slurm", *words], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


def test_a_job_is_submitted_queried_read_and_cancelled_from_python():
    submission = ht.slurm.submit(
        "digits", nodes=2, epochs=3, overrides=["optimizer.batch=64"], options={"account": "m1"}
    )
    assert submission.job == 19
    folder, script = submission.folder, Path("script").read_text()
    assert "#SBATCH --account=m1" in script and "#SBATCH --nodes=2" in script
    assert "--epochs 3 --set optimizer.batch=64" in script
    assert (folder / "job.sbatch").read_text() == script
    assert f"python3 {folder}/batch_job.py" in script
    assert (folder / "batch_job.py").read_text() == SENT.read_text()
    assert [(row["job"], row["state"]) for row in ht.slurm.status(folder)] == [("19", "RUNNING")]
    with pytest.raises(UsageError, match="its job 19 is RUNNING"):
        ht.slurm.submit("digits", nodes=2, out=str(folder))
    assert ht.slurm.cancel(folder) == ["19"]
    assert ht.slurm.status()[0]["state"] == "CANCELLED"


def test_a_program_is_submitted():
    folder = ht.slurm.submit(program=["python", "my train.py", "--rate=1"], nodes=2).folder
    script = Path("script").read_text()
    assert "train=(python 'my train.py' --rate=1)\n" in script and "--program=1" in script
    assert folder.name.startswith("my_train-")
    assert call("status").count("RUNNING") == 1
    output = call("submit", "--nodes", "2", "--", "python", "train.py", "--nodes", "9")
    assert output.startswith("19  runs/train-")
    for words in ((), ("digits", "--", "python", "train.py")):
        with pytest.raises(UsageError, match="expected a recipe, or a program after `--`"):
            call("submit", *words)


REFUSED = {
    "an unknown option": ({"node": 2}, "unknown option of submit 'node'; did you mean 'nodes'?"),
    "ranks that do not fit": ({"nodes": 4, "ranks": 10}, "cannot be shared out evenly"),
    "an engine without servers": ({"servers": 1, "engine": "gossip"}, "gossip has no servers"),
    "no size": ({"sizes": (0, 1)}, "--sizes: expected 1 or more, seen 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_submits_nothing(case):
    options, message = REFUSED[case]
    with pytest.raises(UsageError) as error:
        ht.slurm.submit("digits", **options)
    assert message in str(error.value)
    assert not Path("script").exists() and not Path("runs").exists()


def test_all_unfinished_jobs_of_runs_are_cancelled():
    make_run("runs/a", job16="COMPLETED", job17="RUNNING")
    make_run("runs/b", job18="PENDING")
    make_run("runs/c", job15="FAILED")
    assert call("cancel", "runs/a", "runs/b", "runs/c") == "cancelled: 17\ncancelled: 18\n"
    assert Path("cancelled").read_text() == "17 18\n"
    assert call("cancel", "runs/a") == "no unfinished job\n"


def test_cancel_reports_slurms_faults():
    make_run("runs/a", job17="RUNNING")
    Path("silent").touch()
    with pytest.raises(HpctrainError, match=r"nothing was cancelled: .*Unable to contact"):
        ht.slurm.cancel("runs/a")
    Path("silent").unlink()
    fake(Path.cwd(), "scancel", "echo 'Access denied' >&2; exit 1")
    with pytest.raises(HpctrainError, match="scancel 17: Access denied"):
        ht.slurm.cancel("runs/a")
    with pytest.raises(UsageError, match="name the folder"):
        ht.slurm.cancel()


def test_log_prints_the_output_of_the_newest_job_or_of_the_named_job():
    make_run("runs/a", job17="RUNNING", job18="PENDING")
    assert call("log", "runs/a") == "first of 18\nsecond of 18\n"
    assert call("log", "runs/a", "--job", "17") == "first of 17\nsecond of 17\n"
    Path("runs/a/slurm-18.out").unlink()
    assert call("log", "runs/a") == "first of 17\nsecond of 17\n"
    Path("runs/a/slurm-17.out").unlink()
    with pytest.raises(UsageError, match=r"job 18 is PENDING, and .*slurm-18.out does not exist"):
        call("log", "runs/a")
    with pytest.raises(UsageError, match="unknown job"):
        call("log", "runs/a", "--job", "20")


def test_log_follows_a_job_to_its_end(monkeypatch):
    """A line is printed when it is whole, the last line also without its end."""
    folder = make_run("runs/a", job17="RUNNING")
    file = folder / "slurm-17.out"
    events = [
        lambda: file.write_text(file.read_text() + "third, in "),
        lambda: file.write_text(file.read_text() + "parts\n"),
        lambda: (file.write_text(file.read_text() + "end"), Path("states/17").write_text("FAILED")),
    ]
    monkeypatch.setattr("hpctrain.cluster.jobs.jobs.POLL_INTERVAL_S", 0.0)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: events.pop(0)())
    monkeypatch.setattr("hpctrain.cluster.jobs.jobs.time", clock)  # other threads keep their own
    lines = list(ht.slurm.log(folder, follow=True))
    assert lines == ["first of 17\n", "second of 17\n", "third, in parts\n", "end"]
