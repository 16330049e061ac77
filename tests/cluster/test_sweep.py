"""Sweeps that train: on this machine one member after the other, on Slurm a task for each."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripts import fake

from hpctrain.cli import hpctrain as program
from hpctrain.cluster import sweep
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder, sweep_folder
from hpctrain.tools.report import history
from hpctrain.training import recipe, runs
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

SETTINGS = ("run.epochs=3", "run.interval_steps=6", "checkpoint.every_steps=6",
            "model.widths=[64,8,10]")  # fmt: skip
SWEEP = [word for text in (*SETTINGS, "run.seed=1,2") for word in ("--set", text)]
#: Ends the process of one member, once, as if from outside.
KILLER = """
import os, signal, sys
from pathlib import Path
def on_row(row):
    if "run.seed=2" in sys.argv and row["step"] > 12 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
RECIPE = 'schema = 1\nextends = "digits"\n[run]\nname = "mine"\ncallbacks = ["killer:on_row"]\n'


JOB = "JobId={} JobName=a JobState={} Reason=None Restarts=0 RunTime=00:01:02 NodeList=n1"
#: A scheduler's command that keeps a script.
SBATCH = 'while read -r line; do echo "$line"; done >sent; echo {}'


def output_of(*words: str) -> str:
    """Return what `hpctrain slurm WORDS` prints."""
    call = ["slurm", *words]
    result = CliRunner().invoke(program, call, catch_exceptions=False, standalone_mode=False)
    return result.output


def train_alone(seed: int) -> str:
    """Return the SHA-256 of the parameters of a single run."""
    spec = recipe.load("digits", [*SETTINGS, f"run.seed={seed}"])
    with tempfile.TemporaryDirectory() as out:
        (summary,) = run_ranks(
            1, lambda link: runs.train(spec, over_threads(link, ["a"]), Path(out), resume=True)
        )
    return summary["params_sha256"]


@pytest.mark.processes
def test_a_member_that_was_killed_goes_on_alone(hpctrain, tmp_path):
    (tmp_path / "killer.py").write_text(KILLER)
    (tmp_path / "my.toml").write_text(RECIPE)
    ended = hpctrain("train", "my.toml", *SWEEP, "--out", "s", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "member 2 of 2: run.seed=2: failed with SIGKILL" in ended.stderr
    assert "best: test accuracy" in ended.stdout
    (row,) = history.list_runs(tmp_path)
    assert row.members == {"done": 1, "killed": 1}
    again = hpctrain("train", "--resume=s", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (again.stderr.count("done before"), again.stderr.count("step 12 of 36")) == (1, 1)
    must_be_as_alone(tmp_path)


def must_be_as_alone(folder: Path) -> None:
    """Check that each member of SWEEP has the parameters of a single run."""
    for seed in (1, 2):
        summary = run_folder.read_summary(folder / "s" / f"seed={seed}")
        assert summary["params_sha256"] == train_alone(seed)


#: words before `train` -> of each member's command line
STARTS = {
    "": "",
    "-q": "--quiet",
    "launch -n 2": "launch -n 2",
    "-v launch -n 3 --elastic --spares 1 --min-ranks 2": (
        "--verbose launch -n 3 --elastic --spares=1 --min-ranks=2"
    ),
}


@pytest.mark.parametrize("words", STARTS)
def test_the_command_line_of_a_member(words, tmp_path, monkeypatch):
    """A member that fails does not end the others; one that is stopped does."""
    monkeypatch.chdir(tmp_path)
    calls, codes = [], iter([1, 3, 75])
    monkeypatch.setattr(
        sweep, "_run_job", lambda words, _: (calls.append(" ".join(words)), (next(codes), False))[1]
    )
    line = "train digits --epochs 2 --set run.seed=1,2,3,4 --set log.to=csv,csv --out s"
    result = CliRunner().invoke(program, [*words.split(), *line.split()], catch_exceptions=False)
    assert result.exit_code == 75 and "best: no member is done" in result.stdout
    assert calls == [
        f"{STARTS[words]} train digits --set run.epochs=2 --set log.to=csv,csv "
        f"--set run.seed={seed} --out {tmp_path}/s/seed={seed} --resume".lstrip()
        for seed in (1, 2, 3)
    ]


@pytest.mark.full
@pytest.mark.processes
def test_each_member_is_a_job_of_launch(hpctrain, tmp_path):
    """A member whose loss is not finite does not end the others; mpirun would start no jobs."""
    sets = [word for text in (*SETTINGS, "optimizer.rate=1e30,0.1") for word in ("--set", text)]
    ended = hpctrain("launch", "-n", 2, "train", "digits", *sets, "--out", "s", cwd=tmp_path)
    assert ended.returncode == 3, ended.stderr
    ends = [run_folder.read_summary(tmp_path / "s" / f"rate={rate}") for rate in ("1e30", "0.1")]
    assert [end["status"] for end in ends] == ["failed", "done"]
    assert ends[1]["world_size"] == 2
    inside = hpctrain("train", "digits", *sets, ranks=2, cwd=tmp_path)
    assert inside.returncode == 2
    assert inside.stderr.count("a sweep starts a job for each member, and this is rank 0 of 2") == 1


REFUSED = {
    "digits --set run.seed=1,2 --dry-run": "--dry-run and --replay take one run",
    "digits --set run.seed=1,2 --resume": "expected this sweep in runs/, seen none",
    "digits --set run.seed=1,2 --out s": "s is in use: it holds sweep.json. Add --resume",
    "digits --set run.seed=1,3 --out s --resume": "s holds another sweep, of digits --set run.s",
    "digits --out s --resume": "s holds a sweep: go on by --resume=s alone",
    "digits --set run.seed=1,2 --out a --resume": "a holds a run, not a sweep",
    "digits --set optimizer.batch=4,0 --out b": "--set optimizer.batch=0: .*greater than",
    "--resume=s": "the sweep in s began in /elsewhere: call this there",
}


@pytest.mark.parametrize("command", ["scale digits --ranks 1", "bench step digits"])
def test_other_commands_take_one_value(command):
    words = [*command.split(), "--set", "run.name=a,b"]
    with pytest.raises(UsageError, match=r"--set run\.name: expected one value, seen 2"):
        CliRunner().invoke(program, words, catch_exceptions=False)


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_come_before_any_member_starts(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("s").mkdir()
    run_folder.append_row(Path("a").mkdir() or Path("a"), {"step": 1})
    members = [sweep_folder.Member(f"seed={i}", {"run.seed": str(i)}) for i in (1, 2)]
    file = sweep_folder.SweepFile("digits", ["run.seed=1,2"], members, "/elsewhere")
    sweep_folder.write(Path("s"), file)
    with pytest.raises(UsageError, match=REFUSED[words]):
        CliRunner().invoke(program, ["train", *words.split()], catch_exceptions=False)
    assert not [*Path().glob("*/seed=*")]


def test_a_sweep_is_an_array_of_slurm(tmp_path, monkeypatch):
    """Called again, it submits the members that are neither done nor in the queue."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    fake(tmp_path, "sbatch", SBATCH.format(17))
    line = ("submit", "digits", "--set", "run.seed=5,6,7,8", "--out", "s", "--epochs", "1")
    assert output_of(*line) == "17  s\n"
    text = Path("sent").read_text()
    assert "#SBATCH --array=0-3\n" in text
    assert 'run=s/$member\ntrain=(hpctrain train digits "${values[@]}")' in text
    tasks = [("17 ArrayJobId=17 ArrayTaskId=3", "PENDING"), ("18 ArrayJobId=17 ArrayTaskId=0",
             "COMPLETED"), ("19 ArrayJobId=17 ArrayTaskId=1", "FAILED")]  # fmt: skip
    lines = "\n".join(JOB.format(job, state) for job, state in tasks)
    fake(tmp_path, "scontrol", f"echo '{lines}'")
    for name, end in (("seed=5", "done"), ("seed=6", "failed")):
        Path("s", name).mkdir()
        run_folder.write_summary(Path("s", name), {"status": end})
    rows = json.loads(output_of("status", "--json", "s"))
    assert [(row["job"], row["state"], row["run"]) for row in rows] == [
        ("17_0", "COMPLETED", "s/seed=5"), ("17_1", "FAILED", "s/seed=6"),
        ("17_2", "UNKNOWN", "s/seed=7"), ("17_3", "PENDING", "s/seed=8"),
    ]  # fmt: skip
    fake(tmp_path, "sbatch", SBATCH.format(21))
    assert output_of(*line) == "21  s\n"
    assert "#SBATCH --array=1-2\n" in Path("sent").read_text()
    assert sweep_folder.read(Path("s")).settings == ["run.epochs=1", "run.seed=5,6,7,8"]
    with pytest.raises(UsageError, match="s holds another sweep"):
        output_of(*line, "--set", "run.device=cpu")


@pytest.mark.processes
@pytest.mark.either
def test_on_a_real_slurm(slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_MPI_TYPE", slurm.srun.rpartition("=")[2])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("hpctrain.cluster.jobs.job_status.POLL_INTERVAL_S", 1.0)
    line = ("submit", "digits", *SWEEP, "--out", "s")
    array = output_of(*line).split()[0]
    slurm.jobs.append(int(array))
    assert tasks_of("s") == [(f"{array}_{task}", "COMPLETED", "done") for task in range(2)]
    must_be_as_alone(tmp_path)
    with pytest.raises(UsageError, match="every member of this sweep is done"):
        output_of(*line)
    Path("s/seed=2", run_folder.SUMMARY).unlink()
    array = output_of(*line).split()[0]
    slurm.jobs.append(int(array))
    assert tasks_of("s") == [(f"{array}_1", "COMPLETED", "done")]
    must_be_as_alone(tmp_path)


def tasks_of(folder: str) -> list[tuple[str, str, str]]:
    """Return the tasks of the newest array of a sweep, once they have ended."""
    rows = json.loads(output_of("status", "--json", "--wait", "100", folder))
    return [(row["job"], row["state"], row["status"]) for row in rows]
