"""Jobs that have lost ranks: who is started again, where and how often; elastic jobs of ULFM."""

from __future__ import annotations

import json
import os
import random
import sys
import time

import psutil
import pytest
from scripts import fake

from hpctrain.cluster import launch as module
from hpctrain.cluster import relaunch
from hpctrain.cluster.hosts import Host, allocated_hosts, host_options, remaining_hosts
from hpctrain.cluster.launch import MpiInstallation, build_command, elastic_options
from hpctrain.cluster.loss_policy import LossPolicy, check_policy
from hpctrain.cluster.relaunch import JobEnd, Progress, Start, plan_start, run_until_done
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder

OPENMPI = MpiInstallation("Open MPI", "5.0", "/opt/libmpi.so", "/opt/mpiexec", ulfm=True)
MPICH = MpiInstallation("MPICH", "5.0", "/opt/libmpi.so", "/opt/mpiexec")

# options for 4 ranks -> the beginning of the refusal
REFUSED = [
    (LossPolicy(spares=1), "--spares 1: only an elastic job has spares"),
    (LossPolicy(elastic=True, spares=-1), "--spares: expected 0 or more, seen -1"),
    (LossPolicy(max_restarts=-1), "--max-restarts: expected 0 or more, seen -1"),
    (LossPolicy(elastic=True, min_ranks=0), "--min-ranks: expected 1 to 4"),
    (LossPolicy(max_restarts=1, min_ranks=5), "--min-ranks: expected 1 to 4"),
    (LossPolicy(min_ranks=2), "--min-ranks 2: without --elastic or --max-restarts"),
]


@pytest.mark.parametrize("policy, message", REFUSED)
def test_impossible_options_are_refused(policy, message):
    with pytest.raises(UsageError) as error:
        check_policy(4, policy)
    assert str(error.value).startswith(message)


def test_an_mpi_without_ulfm_is_refused_with_the_remedy():
    assert elastic_options(OPENMPI) == ("--with-ft", "ulfm", "--mca", "coll", "^han,cuda")
    for mpi in (MPICH, OPENMPI._replace(ulfm=False)):
        with pytest.raises(UsageError, match=r"needs Open MPI 5.*loads .* 5\.0.*--max-restarts 3"):
            elastic_options(mpi)


def test_other_commands_are_not_started_again():
    with pytest.raises(UsageError, match="--max-restarts starts `train`, or a program"):
        module.launch(2, ["bench", "allreduce"], LossPolicy(max_restarts=1))


def test_options_precede_the_ranks():
    words = [*elastic_options(OPENMPI), *host_options("Open MPI", [Host("a", 2), Host("b", 1)])]
    line, _ = build_command(OPENMPI, 3, ["x"], oversubscribed=False, as_root=False, options=words)
    assert " ".join(line) == (
        "/opt/mpiexec --with-ft ulfm --mca coll ^han,cuda --host a:2,b:1 "
        "--bind-to none --stdin none -n 3 x"
    )
    assert host_options("MPICH", [Host("a", 2)]) == ["-hosts", "a:2"]
    assert host_options("MPICH", []) == []


@pytest.mark.parametrize(
    "policy, variables",
    [
        (LossPolicy(), {}),
        (LossPolicy(elastic=True, spares=2), {"HPCTRAIN_SPARES": "2"}),
        (LossPolicy(max_restarts=2, min_ranks=1), {"HPCTRAIN_MIN_RANKS": "1"}),
    ],
)
def test_variables_of_the_ranks(policy, variables):
    assert policy.variables() == variables


@pytest.mark.parametrize(
    "environ, restarts",
    [({}, 0), ({"SLURM_RESTART_COUNT": "2"}, 2), ({"HPCTRAIN_RESTARTS": "1"}, 1),
     ({"SLURM_RESTART_COUNT": "2", "HPCTRAIN_RESTARTS": "3"}, 5)],
)  # fmt: skip
def test_restarts_of_all_kinds_are_counted(environ, restarts):
    assert launchers.restarts(environ) == restarts


# exit code, whether a signal asked for the end -> whether the job is started again
ENDS = [
    (0, False, False), (1, False, True), (2, False, False), (3, False, False), (75, False, False),
    (86, False, True), (130, False, False), (137, False, True), (139, False, True),
    (9, False, True),
    (5, False, False), (1, True, False), (143, True, False),
]  # fmt: skip


@pytest.mark.parametrize("code, is_stopped, expected", ENDS)
def test_only_losses_are_followed_by_a_start(code, is_stopped, expected):
    assert JobEnd(code, None, is_stopped).is_loss is expected


# (newest step, seconds) of the starts -> futile starts, pause
PROGRESS = [
    ([(5, 1), (9, 1)], 0, 0),
    ([(0, 1)], 1, 2),
    ([(5, 1), (5, 1), (3, 1)], 2, 4),
    ([(5, 1), (5, 1), (6, 1)], 0, 0),
    ([(None, 1), (None, 1)], 2, 4),
    ([(None, 1), (None, 99)], 0, 0),
]


@pytest.mark.parametrize("starts, futile_starts, pause_s", PROGRESS)
def test_progress(starts, futile_starts, pause_s):
    progress = Progress()
    for step, duration_s in starts:
        progress = progress.after(step, duration_s)
    assert (progress.futile_starts, progress.pause_s) == (futile_starts, pause_s)


A, B, C = Host("a", 2), Host("b", 2), Host("c", 1)
# ranks, spares, remaining hosts of a, b, c -> ranks, spares, hosts
PLANS = [
    (4, 1, [A, B, C], Start(4, 1)),
    (4, 1, [A, B], Start(4, 0, [A, B])),
    (3, 2, [A, B], Start(3, 1, [A, B])),
    (5, 0, [B, C], Start(3, 0, [B, C])),
    (9, 0, [C], Start(1, 0, [C])),
    (5, 0, [], Start(0, 0, [])),
]


@pytest.mark.parametrize("n, spares, remaining, expected", PLANS)
def test_ranks_fit_on_the_hosts_that_are_left(n, spares, remaining, expected):
    assert plan_start(n, LossPolicy(spares=spares), [A, B, C], remaining) == expected


def test_hosts_of_an_allocation(tmp_path, monkeypatch):
    fake(tmp_path, "scontrol", "printf 'n1\\nn2\\nn3\\nn4\\n'")
    fake(tmp_path, "sinfo", "printf 'n1 mixed\\nn2 down*\\nn3 draining\\nn4 allocated*\\n'")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    environ = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x3),1"}
    hosts = allocated_hosts(environ)
    assert hosts == [Host("n1", 2), Host("n2", 2), Host("n3", 2), Host("n4", 1)]
    assert remaining_hosts(hosts) == [Host("n1", 2), Host("n3", 2)]
    fake(tmp_path, "sinfo", "printf 'n1 down\\nn2 down*\\nn3 fail\\nn4 unknown\\n'")
    assert remaining_hosts(hosts) == []
    fake(tmp_path, "sinfo", "exit 1")
    assert remaining_hosts(hosts) == hosts
    assert allocated_hosts({}) == remaining_hosts([]) == []


# ---- the starts of a job ----

R = LossPolicy(max_restarts=3, min_ranks=2)
# policy, (exit code, newest step) of each start -> number of starts, message
STORIES = {
    "done": (R, [(0, 9)], 1, ""),
    "lost, then done": (R, [(1, 4), (0, 9)], 2, "restart 1 of 3 on 4 ranks; resumes "),
    "hung, then failed": (R, [(86, 4), (3, 9)], 2, "restart 1 of 3"),
    "not asked for": (LossPolicy(), [(1, 4)], 1, ""),
    "too often": (R, [(1, 2), (1, 4), (1, 6), (1, 8)], 4, "again: --max-restarts 3 is reached"),
    "in vain": (R, [(1, 0), (1, 0), (1, 0)], 3, "3 starts in a row reached no new step after 0"),
    "in vain later": (R, [(1, 5), (1, 4), (1, 5), (1, 5)], 4, "--max-restarts 3 is reached"),
}


@pytest.mark.parametrize("story", STORIES)
def test_starts_of_a_job(story, tmp_path, monkeypatch, capsys):
    policy, ends, count, message = STORIES[story]
    pauses, starts = [], []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def start_job(start: Start) -> JobEnd:
        code, step = ends[len(starts)]
        starts.append(start)
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkpoints" / f"step-{step:08}" / "manifest.json").touch()
        return JobEnd(code, tmp_path, is_stopped=False)

    assert run_until_done(start_job, 4, policy, []) == ends[-1][0]
    assert [start.restarts for start in starts] == list(range(count))
    assert [start.run for start in starts] == [None, *[tmp_path] * (count - 1)]
    assert message in capsys.readouterr().err
    assert pauses == ([2.0, 4.0] if story == "in vain" else pauses)


def test_a_job_goes_on_with_fewer_ranks(tmp_path, monkeypatch, capsys):
    """Until fewer than --min-ranks would be left; that the batch changes is said once."""
    left = iter([[A, B], [A, B], [C]])
    monkeypatch.setattr(relaunch, "remaining_hosts", lambda hosts: next(left))
    monkeypatch.setattr(time, "sleep", lambda s: None)
    (tmp_path / run_folder.RECIPE).write_text("[data]\nbatch_per_rank = 32\n")
    starts = []

    def start_job(start: Start) -> JobEnd:
        starts.append((start.ranks, list(start.hosts)))
        run_folder.append_row(tmp_path, {"step": len(starts)})
        return JobEnd(1, tmp_path, is_stopped=False)

    assert run_until_done(start_job, 5, LossPolicy(max_restarts=9, min_ranks=2), [A, B, C]) == 1
    assert starts == [(5, []), (4, [A, B]), (4, [A, B])]
    message = capsys.readouterr().err
    assert message.count("batch_per_rank: with 4 ranks instead of 5") == 1
    assert "the remaining hosts (c) have 1 of --min-ranks 2 slots" in message


# ---- with real ranks ----

SETS = ["run.epochs=3", "run.interval_steps=1", "checkpoint.every_steps=5", "faults.step_ms=40"]
TRAIN = ["train", "digits", *(word for item in SETS for word in ("--set", item))]


def wait_for_step(job, run, step: int) -> None:
    deadline = time.monotonic() + 60
    while not (rows := run_folder.rows(run)) or rows[-1]["step"] < step:
        assert time.monotonic() < deadline and job.process.poll() is None, job.output()
        time.sleep(0.02)


@pytest.mark.either
@pytest.mark.processes
def test_a_training_that_lost_a_rank_is_resumed(start, tmp_path):
    run = tmp_path / "run"
    launch = ["-m", "hpctrain", "launch", "-n", 3, "--max-restarts", 2]
    job = start(*launch, *TRAIN, "--out", run)
    for step in (7, 14):
        wait_for_step(job, run, step)
        random.choice(job.ranks()).kill()
        while run_folder.rows(run)[-1]["step"] >= step + 5:
            time.sleep(0.02)
        wait_for_step(job, run, step + 6)
    ended = job.finish()
    summary = json.loads((run / "summary.json").read_text())
    assert (ended.returncode, summary["status"], summary["restarts"]) == (0, "done", 2)
    assert [row["step"] for row in run_folder.rows(run)] == list(range(1, 37))
    assert "a rank was lost: mpiexec ended with" in ended.stderr
    assert f"restart 2 of 2 on 3 ranks; resumes {run}, which was at step " in ended.stderr


SURVIVORS = """
import os, sys, time
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
import numpy as np
MPI.Init()
world, x, victim = MPI.COMM_WORLD, np.zeros(1), int(sys.argv[1])
world.Set_errhandler(MPI.ERRORS_RETURN)
if world.rank == 0:
    print({name: value for name, value in os.environ.items() if name.startswith("HPCTRAIN_")
           and name.endswith(("SPARES", "MIN_RANKS", "RESTARTS"))}, flush=True)
try:
    for step in range(50):
        if step == 9 and world.rank == victim:
            os.kill(os.getpid(), 9)
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        world.Sendrecv(x, right, recvbuf=x.copy(), source=left)
        time.sleep(0.01)
except MPI.Exception:
    world.Revoke()
    world = world.Shrink()
    print("survivors:", world.size, flush=True)
    world.Agree(1)
sys.stdout.flush()
os._exit(int(sys.argv[2]))
"""


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.parametrize("victim, code", [(0, 0), (2, 0), (1, 3)])
def test_survivors_of_an_elastic_job_decide_its_code(start, tmp_path, victim, code):
    if not (mpi := module.find_mpi()).ulfm:
        pytest.skip(f"{mpi.vendor} has no ULFM")
    (tmp_path / "program.py").write_text(SURVIVORS)
    options = ["-n", 3, "--elastic", "--spares", 1, "--min-ranks", 2]
    program = ["--", sys.executable, tmp_path / "program.py", victim, code]
    ended = start("-m", "hpctrain", "launch", *options, *program).finish()
    assert (ended.returncode, ended.stdout.count("survivors: 3")) == (code, 3)
    assert "{'HPCTRAIN_SPARES': '1', 'HPCTRAIN_MIN_RANKS': '2'}" in ended.stdout.replace(
        "{'HPCTRAIN_MIN_RANKS': '2', 'HPCTRAIN_SPARES': '1'}",
        "{'HPCTRAIN_SPARES': '1', 'HPCTRAIN_MIN_RANKS': '2'}",
    )
    assert "prterun noticed" not in ended.stderr


@pytest.mark.processes
def test_spares_need_a_job_that_survives(start, monkeypatch):
    """Without ULFM they would train: refused on all ranks."""
    monkeypatch.setenv("HPCTRAIN_SPARES", "1")
    ended = start("-c", "import hpctrain; hpctrain.init()", ranks=2).finish()
    assert ended.returncode != 0
    assert "HPCTRAIN_SPARES is set, but this job does not survive" in ended.stderr


@pytest.mark.processes
def test_a_program_is_started_again_unchanged(start, tmp_path):
    text = 'echo start $1 $HPCTRAIN_RESTARTS; [ -n "$HPCTRAIN_RESTARTS" ] || kill -9 $$'
    program = ["--", "sh", "-c", text, "sh", "word"]
    ended = start("-m", "hpctrain", "launch", "-n", 1, "--max-restarts", 2, *program).finish()
    assert ended.returncode == 0
    lines = [line for line in ended.stdout.splitlines() if line.startswith("start")]
    assert lines == ["start word", "start word 1"]
    assert "; restart 1 of 2 on 1 rank, in 2 s" in ended.stderr


def test_a_lost_daemon_is_no_success(tmp_path):
    """Open MPI's launcher then ends with 0."""
    from hpctrain.cluster import guard, supervision

    line = "echo PRTE has lost communication with a remote daemon. >&2"
    supervisor = supervision.Supervisor(lambda: b"")
    environ = {**os.environ, guard.JOB_VARIABLE: f"test-{os.getpid()}"}
    assert supervisor.run(["sh", "-c", line], environ).code == 1
    assert not [p for p in psutil.Process().children() if p.name() == "sh"]
