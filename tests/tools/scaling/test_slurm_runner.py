"""Trials as jobs of Slurm: a real one, and a simulated one that refuses and loses jobs."""

from __future__ import annotations

import csv
import logging
import re
import shlex
import signal
from dataclasses import replace

import pytest
from studies import SUBJECT, Times, study, write

from hpctrain.cluster.slurm import submit
from hpctrain.cluster.slurm.submit import JobState
from hpctrain.core import progress
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.tools.scaling import collect
from hpctrain.tools.scaling.output.live_table import LiveView
from hpctrain.tools.scaling.study import StudyFolder
from hpctrain.tools.scaling.trial_recipe import Size, Timing
from hpctrain.tools.scaling.trials import runner, slurm_runner
from hpctrain.training import recipe

JOB = {"site": None, "time": "10", "gpus_per_node": 0, "cpus_per_task": None, "options": {}}


class MadeUp:
    """Stands for cluster/slurm/submit.py: jobs end when they are asked for the second time."""

    def __init__(self, monkeypatch, refused=(), lost=(), silent=()):
        self.refused, self.lost, self.silent, self.jobs, self.asked = refused, lost, silent, [], {}
        monkeypatch.setattr(slurm_runner.submit, "submit_script", self.submit)
        monkeypatch.setattr(slurm_runner.submit, "query_slurm", self.ask)
        monkeypatch.setattr(slurm_runner.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(slurm_runner, "LATE_S", 0.0)

    def submit(self, text, folder):
        size = int(re.search(r"^#SBATCH --nodes=(\d+)", text, re.M)[1])
        if size in self.refused:
            raise UsageError("sbatch refuses the job:\nToo many nodes\n  line 3")
        if size in self.silent:
            raise HpctrainError("sbatch has not answered within 120 s")
        words = shlex.split(re.search(r"^train=\((.*)\)$", text, re.M)[1])
        run = shlex.split(re.search(r"^run=(.*)$", text, re.M)[1])[0]
        self.jobs.append((size, words[2], submit.Path(run)))
        folder.mkdir(parents=True)
        submit.run_folder.write_json(folder / submit.JOBS_FILE, {"jobs": [len(self.jobs)]})
        return len(self.jobs)

    def ask(self, job):
        self.asked[job] = self.asked.get(job, 0) + 1
        size, file, out = self.jobs[job - 1]
        if self.asked[job] == 1:
            return [JobState(str(job), "PENDING", "Priority")]
        if self.asked[job] == 2:
            raise HpctrainError("scontrol has not answered within 120 s")
        if size in self.lost:
            return [JobState(str(job), "NODE_FAIL")]
        if not out.exists():
            spec = recipe.load(file)
            timing = Timing(spec.run.interval_steps)
            write(out, timing, Times(1e-2, 9e-3), spec.batch.size(size), size)
        return [JobState(str(job), "COMPLETED")]


def run(folder, of):
    missing = runner.missing_trials(folder, of)
    with LiveView(of) as view:
        return list(slurm_runner.trials(folder, of, SUBJECT, missing, view))


def of_nodes(*nodes, **changes):
    sizes = tuple(Size(n, n) for n in nodes)
    return replace(study(), on="slurm", sizes=sizes, repeats=2, job=JOB, **changes)


def test_a_job_for_each_size_and_repeat(tmp_path, monkeypatch):
    created, of, folder = MadeUp(monkeypatch), of_nodes(1, 2), StudyFolder(tmp_path)
    assert all(isinstance(item, collect.TrialResult) for item in run(folder, of))
    assert [size for size, _, _ in created.jobs] == [1, 2, 1, 2]
    assert run(folder, of) == []  # all is there


def test_jobs_under_way_are_found_again(tmp_path, monkeypatch, caplog):
    created, of, folder = MadeUp(monkeypatch), of_nodes(1), StudyFolder(tmp_path)

    def stop(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(slurm_runner.time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        run(folder, of)
    assert len(created.jobs) == 2
    assert "the same command collects them, and `scancel 1 2` ends them" in caplog.text
    monkeypatch.setattr(slurm_runner.time, "sleep", lambda seconds: None)
    assert all(isinstance(item, collect.TrialResult) for item in run(folder, of))
    assert len(created.jobs) == 2  # none was submitted twice


def test_a_job_whose_id_never_came_back_is_found_by_its_name(tmp_path, monkeypatch):
    created, of, folder = (
        MadeUp(monkeypatch),
        replace(of_nodes(1), repeats=1),
        StudyFolder(tmp_path),
    )

    def killed(text, saved):
        created.submit(text, saved)
        (saved / submit.JOBS_FILE).unlink()
        raise SystemExit

    monkeypatch.setattr(slurm_runner.submit, "submit_script", killed)
    with pytest.raises(SystemExit):
        run(folder, of)
    requested = []
    monkeypatch.setattr(
        slurm_runner.submit, "find_jobs_by_name", lambda name: requested.append(name) or [1]
    )
    assert all(isinstance(item, collect.TrialResult) for item in run(folder, of))
    assert len(created.jobs) == 1  # `killed` was not called again
    assert re.fullmatch(r"scale-digits-1-0-[0-9a-f]{8}", *requested)


@pytest.fixture
def ctrl_c():
    """Let SIGINT interrupt: where a shell has started us in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_ctrl_c_waits_until_the_id_of_a_job_is_kept(tmp_path, monkeypatch):
    created, of, folder = MadeUp(monkeypatch), of_nodes(1), StudyFolder(tmp_path)

    def pressed(text, saved):
        signal.raise_signal(signal.SIGINT)
        return created.submit(text, saved)

    with monkeypatch.context() as patched:
        patched.setattr(slurm_runner.submit, "submit_script", pressed)
        with pytest.raises(KeyboardInterrupt):
            run(folder, of)
    assert submit.read_job_ids(collect.job_folder(folder.trial(Size(1), 0))) == [1]
    run(folder, of)
    assert len(created.jobs) == of.repeats
    with pytest.raises(KeyboardInterrupt):  # as ever
        signal.raise_signal(signal.SIGINT)


def test_what_slurm_refuses_or_loses_is_a_gap(tmp_path, monkeypatch):
    MadeUp(monkeypatch, refused=(4,), lost=(2,), silent=(8,))
    of, folder = of_nodes(1, 2, 4, 8), StudyFolder(tmp_path)
    run(folder, of)
    result = {size.ranks: runner.trial(folder, of, 0, size) for size in of.sizes}
    assert isinstance(result[1], collect.TrialResult)
    assert result[2].reason == "Slurm's job 2 is NODE_FAIL"
    assert result[4].reason == "sbatch refuses the job: Too many nodes line 3"
    assert result[8].reason == "sbatch has not answered within 120 s"


def test_a_job_that_will_not_start_as_it_is_is_a_gap(tmp_path, monkeypatch):
    created, of, folder = MadeUp(monkeypatch), of_nodes(1, 8), StudyFolder(tmp_path)
    never = lambda job: [JobState(str(job), "PENDING", "PartitionNodeLimit")]  # noqa: E731
    monkeypatch.setattr(
        slurm_runner.submit,
        "query_slurm",
        lambda job: never(job) if job % 2 == 0 else created.ask(job),
    )
    for _ in range(2):  # called again, it is waited for no longer, and not given to Slurm anew
        run(folder, of)
        assert isinstance(runner.trial(folder, of, 0, Size(1, 1)), collect.TrialResult)
        assert runner.trial(folder, of, 0, Size(8, 8)).reason == (
            "Slurm's job 2 is PENDING (PartitionNodeLimit: it asks for more nodes than the "
            "partition has or allows); `scancel 2` ends it"
        )
        assert len(created.jobs) == 4


def test_who_waits_in_a_log_reads_why_jobs_do_not_start(tmp_path, monkeypatch, caplog):
    created, of, folder = MadeUp(monkeypatch), of_nodes(1), StudyFolder(tmp_path)
    polls = {}

    def held(job):
        polls[job] = polls.get(job, 0) + 1
        return (
            created.ask(job) if polls[job] > 5 else [JobState(str(job), "PENDING", "JobHeldUser")]
        )

    monkeypatch.setattr(slurm_runner.submit, "query_slurm", held)
    with caplog.at_level(logging.INFO, "hpctrain"):
        run(folder, of)
    rate = "12,800 samples/s, efficiency so far 100.0%"
    assert [item.getMessage() for item in caplog.records] == [
        "1 rank, repeats 1, 2 of 2: pending, jobs 1, 2, JobHeldUser: held: scontrol release it",
        "1 rank, repeats 1, 2 of 2: pending, jobs 1, 2, Priority: other jobs come first",
        "1 rank, repeats 1, 2 of 2: no answer, jobs 1, 2, scontrol has not answered within 120 s",
        f"1 rank, repeat 1 of 2: {rate}",
        f"1 rank, repeat 2 of 2: {rate}",
    ]


#: --option, --time, and what jobs ask for; nodes are not shared unless the user says how
REQUESTED = {
    ((), None): ({"exclusive": ""}, slurm_runner.TIME),
    (("account=m1",), "5"): ({"account": "m1", "exclusive": ""}, "5"),
    (("exclusive=user",), "5"): ({"exclusive": "user"}, "5"),
    (("oversubscribe",), "5"): ({"oversubscribe": ""}, "5"),
}


@pytest.mark.parametrize("typed", REQUESTED, ids=str)
def test_what_is_asked_about_jobs(typed):
    words = dict.fromkeys(("site", "gpus_per_node", "cpus_per_task"))
    requested = slurm_runner.job_options(words | {"options": typed[0], "time": typed[1]})
    assert (requested["options"], requested["time"]) == REQUESTED[typed]
    with pytest.raises(UsageError, match="--option account=: expected a value"):
        slurm_runner.job_options(words | {"time": "5", "options": ("account=",)})


def test_gpus_go_with_ranks():
    of = of_nodes(1)
    four = replace(of, sizes=(Size(2, 1), Size(8, 2)), job=JOB | {"gpus_per_node": 4})
    jobs = [slurm_runner._job(four, size, "r.toml", "out", "a name") for size in four.sizes]
    assert [(job.nodes, job.tasks_per_node, job.gpus_per_node) for job in jobs] == [
        (1, 2, 2), (2, 4, 4),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="--time never"):
        slurm_runner.must_render(replace(of, job=JOB | {"time": "never"}))


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.either
@pytest.mark.timeout(400)
def test_a_collector_on_a_real_slurm_is_killed_and_called_again(slurm, start, tmp_path):
    words = (
        "-m",
        "hpctrain",
        "scale",
        "digits",
        "--on",
        "slurm",
        "--nodes",
        "1,2",
        "--mode",
        "weak",
    )
    small = ("--steps", "20", "--repeats", "1", "--time", "5", "--option", "hold", "--out", "study")
    env = {**slurm.environ, "SLURM_MPI_TYPE": slurm.srun.rpartition("=")[2]}
    before = jobs_in(slurm)
    first = start(*words, *small, env=env)
    first.until("2 ranks on 2 nodes, repeat 1 of 1: pending, job ", timeout=100)
    first.process.kill()
    arguments = sorted(jobs_in(slurm) - before)
    slurm.jobs.extend(arguments)
    assert len(arguments) == 2
    # as where the one who waits is killed before it has kept an id
    (tmp_path / "study/trials/00002-ranks-00002-nodes/repeat-0.job" / submit.JOBS_FILE).unlink()
    again = start(*words, *small, env={**env, progress.TERMINAL: "150", "TERM": "xterm"})
    again.until("JobHeldUser: held: scontrol release it", timeout=100)
    slurm.scontrol("release", ",".join(map(str, arguments)))
    completed = again.finish(100)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    text = (tmp_path / "study" / "scaling.csv").read_text()
    rows = [row for row in csv.DictReader(text.splitlines()) if row["kind"] == "measured"]
    assert [(row["ranks"], row["nodes"]) for row in rows] == [("1", "1"), ("2", "2")]
    assert sorted(jobs_in(slurm) - before) == arguments  # none was submitted twice
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", completed.stderr)
    for size, job in enumerate(arguments, start=1):
        assert re.search(rf"│ +{size} │ +{size} │ pending +│ {job} +│ +0 of 1 │", drawn)
        assert re.search(rf"│ +{size} │ +{size} │ measured +│ {job} +│ +1 of 1 │", drawn)


def jobs_in(slurm):
    """Return all jobs that Slurm knows of."""
    return set(map(int, slurm.run("squeue", "--noheader", "--states=all", "--format=%A").split()))
