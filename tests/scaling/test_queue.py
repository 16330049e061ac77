"""Trials as jobs of Slurm: a real one, and a made-up one that refuses and loses jobs."""

from __future__ import annotations

import csv
import logging
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from studies import SPEC, Times, study, write

from hpctrain import recipe
from hpctrain.cluster import submit
from hpctrain.cluster.submit import State
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.scaling import collect, conduct, queue
from hpctrain.scaling.changes import Timing
from hpctrain.scaling.sizes import Size
from hpctrain.scaling.study import Folder
from hpctrain.scaling.teller import Teller

JOB = {"site": None, "time": "10", "gpus_per_node": 0, "cpus_per_task": None, "options": {}}


class MadeUp:
    """Stands for cluster/submit.py: jobs end when they are asked for the second time."""

    def __init__(self, monkeypatch, refused=(), lost=(), silent=()):
        self.refused, self.lost, self.silent, self.jobs, self.asked = refused, lost, silent, [], {}
        monkeypatch.setattr(queue.submit, "submit", self.submit)
        monkeypatch.setattr(queue.submit, "ask", self.ask)
        monkeypatch.setattr(queue.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(queue, "LATE_S", 0.0)

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
        submit.rundir.write_json(folder / submit.JOBS, {"jobs": [len(self.jobs)]})
        return len(self.jobs)

    def ask(self, job):
        self.asked[job] = self.asked.get(job, 0) + 1
        size, file, out = self.jobs[job - 1]
        if self.asked[job] == 1:
            return [State(str(job), "PENDING", "Priority")]
        if self.asked[job] == 2:
            raise HpctrainError("scontrol has not answered within 120 s")
        if size in self.lost:
            return [State(str(job), "NODE_FAIL")]
        if not out.exists():
            spec = recipe.load(file)
            timing = Timing(spec.run.interval_steps)
            write(out, timing, Times(1e-2, 9e-3), spec.batch.size(size), size)
        return [State(str(job), "COMPLETED")]


def run(folder, of):
    missing = conduct.missing(folder, of)
    with Teller("a study", len(missing)) as teller:
        return list(queue.trials(folder, of, SPEC, missing, teller))


def of_nodes(*nodes, **changes):
    sizes = tuple(Size(n, n) for n in nodes)
    return replace(study(), on="slurm", sizes=sizes, repeats=2, job=JOB, **changes)


def test_a_job_for_each_size_and_repeat(tmp_path, monkeypatch):
    made, of, folder = MadeUp(monkeypatch), of_nodes(1, 2), Folder(tmp_path)
    assert all(isinstance(one, collect.Trial) for one in run(folder, of))
    assert [size for size, _, _ in made.jobs] == [1, 2, 1, 2]
    assert run(folder, of) == []  # all is there


def test_jobs_under_way_are_found_again(tmp_path, monkeypatch):
    made, of, folder = MadeUp(monkeypatch), of_nodes(1), Folder(tmp_path)

    def stop(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(queue.time, "sleep", stop)
    with pytest.raises(KeyboardInterrupt):
        run(folder, of)
    assert len(made.jobs) == 2
    monkeypatch.setattr(queue.time, "sleep", lambda seconds: None)
    assert all(isinstance(one, collect.Trial) for one in run(folder, of))
    assert len(made.jobs) == 2  # none was submitted twice


def test_what_slurm_refuses_or_loses_is_a_gap(tmp_path, monkeypatch):
    MadeUp(monkeypatch, refused=(4,), lost=(2,), silent=(8,))
    of, folder = of_nodes(1, 2, 4, 8), Folder(tmp_path)
    run(folder, of)
    found = {size.ranks: conduct.trial(folder, of, 0, size) for size in of.sizes}
    assert isinstance(found[1], collect.Trial)
    assert found[2].reason == "Slurm's job 2 is NODE_FAIL"
    assert found[4].reason == "sbatch refuses the job: Too many nodes line 3"
    assert found[8].reason == "sbatch has not answered within 120 s"


def test_who_waits_in_a_log_reads_why_jobs_do_not_start(tmp_path, monkeypatch, caplog):
    made, of, folder = MadeUp(monkeypatch), of_nodes(1), Folder(tmp_path)
    polls = {}

    def held(job):
        polls[job] = polls.get(job, 0) + 1
        return made.ask(job) if polls[job] > 5 else [State(str(job), "PENDING", "JobHeldUser")]

    monkeypatch.setattr(queue.submit, "ask", held)
    with caplog.at_level(logging.INFO, "hpctrain"):
        run(folder, of)
    assert [one.getMessage() for one in caplog.records if "jobs: " in one.getMessage()] == [
        "jobs: 2 pending (JobHeldUser: held: scontrol release it)",
        "jobs: 2 pending (Priority: other jobs come first)",
        "jobs: 2 no answer (scontrol has not answered within 120 s)",
    ]


@pytest.mark.parametrize("options, time", [((), "0:30:00"), (("account=m1",), "5")])
def test_what_is_asked_about_jobs(options, time):
    words = dict.fromkeys(("site", "gpus_per_node", "cpus_per_task")) | {"options": options}
    asked = queue.asked(words | {"time": None if time == queue.TIME else time})
    assert (asked["time"], asked["options"]) == (time, {"account": "m1"} if options else {})
    with pytest.raises(UsageError, match="--option account=: expected a value"):
        queue.asked(words | {"time": time, "options": ("account=",)})


def test_gpus_go_with_ranks():
    of = of_nodes(1)
    four = replace(of, sizes=(Size(2, 1), Size(8, 2)), job=JOB | {"gpus_per_node": 4})
    jobs = [queue._job(four, size, "r.toml", "out") for size in four.sizes]
    assert [(job.nodes, job.tasks_per_node, job.gpus_per_node) for job in jobs] == [
        (1, 2, 2), (2, 4, 4),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="--time never"):
        queue.must_render(replace(of, job=JOB | {"time": "never"}))


@pytest.mark.processes
def test_on_a_real_slurm(slurm, tmp_path):
    words = ("scale", "digits", "--on", "slurm", "--nodes", "1,2", "--mode", "weak")
    small = ("--steps", "20", "--repeats", "1", "--time", "5", "--out", "study")
    env = {**slurm.environ, "SLURM_MPI_TYPE": slurm.srun.rpartition("=")[2]}
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", *words, *small],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "study" / "scaling.csv").read_text()
    rows = [row for row in csv.DictReader(text.splitlines()) if row["kind"] == "measured"]
    assert [(row["ranks"], row["nodes"]) for row in rows] == [("1", "1"), ("2", "2")]
