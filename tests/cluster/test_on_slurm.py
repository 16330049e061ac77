"""Training in jobs of a real Slurm of four nodes; see tests/lib/real_slurm.py."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread

import psutil
import pytest
import real_slurm
import threadpoolctl
from scripts import SENT, STORM
from tables import rows_of

from hpctrain import checkpoint
from hpctrain.cluster.launch import find_mpi
from hpctrain.cluster.slurm import batch_job
from hpctrain.cluster.slurm.render import Job, render
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe, runs
from hpctrain.transport.threads.link import LocalLink
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import World, over_threads

pytestmark = pytest.mark.processes

HOLD = """
import os, time, real_slurm
with real_slurm.running(os.environ) as slurm:
    slurm.run("srun", "--nodes=1", "true")
    slurm.sbatch("#!/bin/sh\\n: >began; sleep 600", cwd=slurm.folder)
    while not (slurm.folder / "began").exists():
        time.sleep(0.02)
    print(slurm.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.either
def test_slurm_can_be_left_out(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_NO_SLURM", "1")
    assert "HPCTRAIN_NO_SLURM" in real_slurm.missing.__wrapped__()


@pytest.mark.either
def test_slurm_ends_with_those_who_started_it():
    if reason := real_slurm.missing():
        pytest.skip(reason)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen([sys.executable, "-c", HOLD], env=environ, stdout=subprocess.PIPE)
    folder = Path(owner.stdout.readline().decode().strip() or "/not/up")
    assert _processes_of(folder) >= 6  # munged, a controller and four nodes
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=100)
    deadline = time.monotonic() + 100
    while (remaining := folder.exists() or _processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not remaining


def _processes_of(folder: Path) -> int:
    return sum(str(folder) in message for message in map(_reported, psutil.process_iter()))


def _reported(process: psutil.Process) -> str:
    try:
        return " ".join([*process.cmdline(), process.environ().get("SLURM_CONF", "")])
    except psutil.Error:
        return ""


TINY = ["run.epochs=3", "run.interval_steps=1", "wire.algorithm=ring", "checkpoint.every_steps=5"]
STEPS, INTERVAL = 36, 5
START_S = 8.0  # until Python, MPI and the data are there: about so long beside others


@dataclass
class Training:
    """A job of a rendered script that trains a few slow steps."""

    slurm: real_slurm.Slurm
    job: int
    run: Path
    step_s: float

    def live(self, share: float) -> None:
        """Wait until `share` of the life of the job is over; a third of it is its start.

        That begins with the script: before its first line, bash does not know what USR1 means.
        """
        real_slurm.until((self.run / ".began").exists, 100, "the script does not begin")
        step = STEPS * (1.5 * share - 0.5)
        if step < 0:
            time.sleep(START_S * 3 * share)
        else:
            self.reach(int(step))
            time.sleep(step % 1 * self.step_s)
        self.slurm.nudge(self.job)
        self.slurm.wait(self.job, "RUNNING", "COMPLETED")

    def reach(self, step: int, limit_s: float = 100) -> None:
        """Wait until a row of metrics tells of `step`."""
        deadline = time.monotonic() + limit_s
        while not self.steps or max(self.steps) < step:
            assert time.monotonic() < deadline, self.slurm.told(self.job)
            self.slurm.nudge(self.job)
            time.sleep(0.02)

    @property
    def nodes(self) -> list[str]:
        """The nodes on which the job runs."""
        names = self.slurm.job(self.job)["NodeList"]
        return self.slurm.scontrol("show", "hostnames", names).split()

    @property
    def steps(self) -> list[int]:
        """The steps of which there are rows."""
        return [row["step"] for row in run_folder.rows(self.run)]

    @property
    def to_do_again(self) -> int:
        """How many steps are done and in no good checkpoint."""
        result = [item for item in checkpoint.listing(self.run) if not checkpoint.verify(item.path)]
        return max(self.steps, default=0) - max((item.step for item in result), default=0)

    @property
    def summary(self) -> dict:
        return run_folder.read_summary(self.run) or {}


def submit(
    slurm,
    folder: Path,
    *options: object,
    step_ms: int = 40,
    extra: Sequence[str] = (),
    **job: object,
) -> Training:
    sets = [*TINY, *extra, f"faults.step_ms={step_ms}"]
    arguments = tuple(word for item in sets for word in ("--set", item))
    text = render(Job(**{"nodes": 4, "arguments": arguments, "out": "run", **job}))
    folder.mkdir(exist_ok=True)
    job = slurm.sbatch(text, "--export=ALL,OMP_NUM_THREADS=1", *options, cwd=folder)
    return Training(slurm, job, folder / "run", step_ms / 1000)


@cache
def complete(nodes: int, *extra: str) -> str:
    """Return the SHA-256 of the parameters of a run that nothing interrupts."""
    spec = recipe.load("digits", [*TINY, *extra])

    def of_nodes(link: LocalLink) -> World:
        return over_threads(link, real_slurm.NODES[:nodes])

    with threadpoolctl.threadpool_limits(1), tempfile.TemporaryDirectory() as out:
        ends = run_ranks(nodes, lambda link: runs.train(spec, of_nodes(link), Path(out), True))
    return ends[0]["params_sha256"]


@pytest.fixture(scope="module")
def limited(slurm_daemons, tmp_path_factory) -> Iterator[Training]:
    """A job that reaches its time limit while other tests run, half a minute after its start."""
    folder = tmp_path_factory.mktemp("limited")
    training = submit(slurm_daemons, folder, step_ms=2000, nodes=1, time="2", warn_s=60)
    holder = Thread(target=hold_when_requeued, args=[slurm_daemons, training.job])
    holder.start()
    yield training
    slurm_daemons.run("scancel", training.job)
    holder.join()


def hold_when_requeued(slurm, job: int) -> None:
    """Hold a job that puts itself back into the queue: it would start again after two minutes."""
    while (facts := slurm.job(job))["Restarts"] == "0":
        time.sleep(1)
        if facts["JobState"] in real_slurm.ENDED:
            return
    with suppress(RuntimeError):  # it was cancelled
        slurm.scontrol("hold", job)


@pytest.mark.parametrize(
    "line",
    ["hpctrain launch -n 4", pytest.param("mpiexec -n 4 hpctrain", marks=pytest.mark.full)],
)
def test_launchers_take_the_nodes_of_the_job(slurm, tmp_path, line):
    sets = " ".join(f"--set {item}" for item in TINY)
    text = f"#!/bin/bash\n{line} train digits {sets} --out run\n"
    job = slurm.sbatch(text, "--nodes=4", "--ntasks-per-node=1", cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED", slurm.told(job)
    summary = run_folder.read_summary(tmp_path / "run")
    assert (summary["status"], summary["hosts"]) == ("done", list(real_slurm.NODES))


TEMPLATES = {
    "multi_node.sbatch": [4],
    "parameter_server.sbatch": [5],
    "one_node.sbatch": [4],
    "scaling_array.sbatch": [1, 2, 4],
}
*QUICK, ARRAY = TEMPLATES


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*rows_of(QUICK), pytest.param(ARRAY, marks=pytest.mark.full)])
def test_templates_train_as_they_are(slurm, tmp_path, name, limited):
    shutil.copytree(Path(__file__).parents[2] / "slurm", tmp_path / "slurm")
    job = slurm.sbatch(Path("slurm", name), cwd=tmp_path)
    tasks = [f"{job}_{i}" for i in range(3)] if name == ARRAY else [job]
    for task in tasks:
        assert slurm.finish(task, limit_s=100) == "COMPLETED", slurm.told(task)
    result = [run_folder.read_summary(path.parent) for path in tmp_path.rglob(run_folder.SUMMARY)]
    assert sorted(item["world_size"] for item in result) == TEMPLATES[name]
    assert {item["status"] for item in result} == {"done"}
    assert all(item["test_accuracy"] > 0.96 for item in result)
    assert max(len(item["hosts"]) for item in result) == (1 if name.startswith("one") else 4)


def usr1(slurm, job: int, node: str) -> None:
    slurm.run("scancel", "--quiet", "--batch", "--signal=USR1", job)


def requeue(slurm, job: int, node: str) -> None:
    slurm.scontrol("requeue", job)


def lose(slurm, job: int, node: str) -> None:
    # It stays away. Soon back, it would tell of the end of the job's first part in its second, from
    # which Slurm then takes that node; those two minutes before a job comes back are to prevent it.
    slurm.node_lost(node)


# What happens to a job while it runs, how many steps may have to be done again, and how often this
# is tried at random moments.
EVENTS = {
    "USR1": (usr1, 0, 20),
    "an administrator requeues it": (requeue, 0, 10),
    "a node is lost": (lose, INTERVAL, 10),
}


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.either
def test_an_interrupted_job_loses_nothing(slurm, tmp_path, limited):
    """Nor one that was restarted often enough, and is submitted again."""
    training, after = _with_one_after(slurm, tmp_path)
    for step, (happen, redone, _) in zip((5, 11, 17), EVENTS.values(), strict=True):
        training.reach(step)
        happen(slurm, training.job, training.nodes[-1])
        slurm.wait(training.job, "PENDING")
        assert training.to_do_again <= redone, slurm.told(training.job)
        slurm.hurry(training.job)
    training.reach(22)
    usr1(slurm, training.job, training.nodes[-1])
    assert slurm.wait(training.job) == "FAILED"
    assert "restarted 3 times, which is enough: to go on submit" in slurm.told(training.job)
    assert slurm.job(after)["JobState"] == "PENDING"
    training, after = _with_one_after(slurm, tmp_path)
    _must_be(training, complete(2), restarts=0)
    assert slurm.wait(after) == "COMPLETED"


def _with_one_after(slurm, folder: Path) -> tuple[Training, int]:
    """Submit a job of two nodes and three restarts, and one that is to run if it is done."""
    training = submit(slurm, folder, step_ms=80, nodes=2, max_restarts=3)
    condition = f"--dependency=afterok:{training.job}"
    return training, slurm.sbatch("#!/bin/sh\n:", condition, "--nodes=1", cwd=folder)


def _must_be(training: Training, complete: str, restarts: int, limit_s: float = 100) -> None:
    """Assert that a job ends with each step done once and the parameters `whole`."""
    ended = training.slurm.finish(training.job, limit_s)
    assert ended == "COMPLETED", training.slurm.told(training.job)
    assert training.steps == list(range(1, STEPS + 1))
    reported = training.summary
    assert (reported["status"], reported["params_sha256"]) == ("done", complete)
    assert reported["restarts"] >= restarts
    assert reported["steps_redone"] <= INTERVAL


def kill_rank(slurm, job: int, node: str) -> None:
    keeper = psutil.Process(slurm.keeper.pid)
    ranks = [p for p in keeper.children(recursive=True) if _is_rank(p, node)]
    assert ranks, slurm.told(job)
    ranks[0].kill()


def _is_rank(process: psutil.Process, node: str) -> bool:
    """Return whether this is the process of a rank; a launcher's daemon has its variables too."""
    try:
        words, environ = process.cmdline(), process.environ()
    except psutil.Error:
        return False
    is_python = "python" in words[0] if words else False
    has_rank = {"PMI_RANK", "PMIX_RANK"} & environ.keys()
    return bool(is_python and has_rank and environ.get("SLURMD_NODENAME") == node)


@pytest.mark.either
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "elastic", [False, pytest.param(True, marks=pytest.mark.full, id="under ULFM")]
)
def test_after_a_loss_a_job_goes_on_in_its_allocation(slurm, tmp_path, elastic):
    """A killed rank is started again; after the loss of a node one rank fewer trains."""
    if elastic and not find_mpi().ulfm:
        pytest.skip("the MPI has no ULFM")
    training = submit(slurm, tmp_path, step_ms=80, min_ranks=3, elastic=elastic)
    for step, happen, node in ((6, kill_rank, "n2"), (16, lose, "n4")):
        training.reach(step)
        last_step = max(training.steps)
        happen(slurm, training.job, node)
        training.reach(last_step + 1)
    assert slurm.wait(training.job) == "COMPLETED", slurm.told(training.job)
    reported = training.summary
    assert (reported["status"], reported["hosts"]) == ("done", ["n1", "n2", "n3"])
    assert reported["restarts"] <= 2 and training.steps == list(range(1, STEPS + 1))
    assert slurm.job(training.job)["Restarts"] == "0"


SERVER = ["engine.kind=ps-sync", "engine.servers=1", "engine.placement=dedicated"]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_server_on_a_node_of_its_own_comes_back_with_its_workers(slurm, tmp_path):
    """A heterogeneous job has a job for each part; one is requeued with the other."""
    servers = {"nodes": 2, "servers": 1, "server_nodes": 1, "extra": SERVER[:1]}
    training = submit(slurm, tmp_path, step_ms=80, **servers)
    for step, (happen, maximum, _) in zip((5, 11, 17), EVENTS.values(), strict=True):
        training.reach(step)
        node = slurm.job(f"{training.job}+1")["NodeList"]
        happen(slurm, training.job, node)
        slurm.wait(training.job, "PENDING")
        assert training.to_do_again <= maximum, slurm.told(training.job)
        slurm.hurry(training.job)
    # Slurm may wait a minute longer for the step: its daemons do so for one of a lost node.
    _must_be(training, complete(3, *SERVER), restarts=3, limit_s=150)
    assert training.summary["hosts"] == ["n1", "n2", "n4"]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cause", ["time limit", "preempted"])
def test_a_job_that_slurm_stops_ends_with_the_same_bytes(slurm, tmp_path, cause):
    """However often its time is over: Slurm looks twice a minute."""
    over = cause == "time limit"
    slow = {"step_ms": 1300, "time": "2", "warn_s": 80} if over else {"step_ms": 150}
    training = submit(slurm, tmp_path, **slow)
    training.reach(3)
    if not over:
        urgent = ("--partition=urgent", "--nodelist=n3", "--exclusive")
        slurm.wait(slurm.sbatch("#!/bin/sh\n:", *urgent, cwd=tmp_path))
    slurm.wait(training.job, "PENDING")
    assert f"({cause})" in training.summary["reason"], slurm.told(training.job)
    assert training.to_do_again == 0
    _must_be(training, complete(4), restarts=1, limit_s=200)
    assert training.summary["steps_redone"] == 0


@pytest.mark.either
def test_it_is_told_why_a_job_stops(slurm, tmp_path, limited):
    two = {"nodes": 2, "step_ms": 1000}
    preempted = submit(slurm, tmp_path / "preempted", "--nodelist=n3,n4", **two)
    cancelled = submit(slurm, tmp_path / "cancelled", "--nodelist=n1,n2", **two)
    for training in (preempted, cancelled):
        training.reach(2)
    slurm.sbatch("#!/bin/sh\n:", "--partition=urgent", "--nodelist=n3", "--exclusive", cwd=tmp_path)
    slurm.run("hpctrain", "slurm", "cancel", cancelled.run)
    assert slurm.wait(cancelled.job) == "CANCELLED"
    slurm.wait(preempted.job, "PENDING")
    slurm.wait(limited.job, "PENDING")
    for training, cause in (
        (preempted, "on request (preempted)"),
        (cancelled, "by SIGTERM"),
        (limited, "on request (time limit)"),
    ):
        step = training.steps[-1]
        assert training.summary["status"] == "stopped"
        assert training.summary["reason"] == f"stopped at step {step} of {STEPS} {cause}; resume me"
        assert training.to_do_again == 0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "in_container", [True, pytest.param(False, marks=pytest.mark.full)], ids=["container", "host"]
)
def test_a_storm_of_signals_ends_no_job(slurm, tmp_path, in_container):
    """Also where hpctrain is in a container alone, here: on a PATH that the batch host has not."""
    path, host = os.path.dirname(sys.executable), "/usr/bin:/bin"
    launcher = f"srun --kill-on-bad-exit=1 env PATH={path}:{host}"
    container = f"export PATH={host} HPCTRAIN_LAUNCHER='{launcher}'\n"
    (tmp_path / "slurm").mkdir()
    shutil.copy(SENT, tmp_path / "slurm")
    (tmp_path / "slurm/site.env").write_text(container * in_container + STORM)
    # Longer than the interval at which USR1 is repeated: srun drops it before its tasks begin.
    training = submit(slurm, tmp_path, step_ms=150, nodes=2)
    assert STEPS * training.step_s > 1.5 * batch_job._REPEAT_S
    _must_be(training, complete(2), restarts=1)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "event, seed", [(event, i) for event, (_, _, n) in EVENTS.items() for i in range(n)]
)
def test_at_any_moment_nothing_is_lost(slurm, tmp_path, event, seed):
    """From before Python has started to the last step, and while a checkpoint is written."""
    happen, maximum, seeds = EVENTS[event]
    draw = random.Random(f"{event} {seed}")
    share = (seed + draw.random()) / seeds
    training = submit(slurm, tmp_path, step_ms=150, nodes=3)
    training.live(share)
    node = draw.choice(training.nodes)
    happen(slurm, training.job, node)
    ended = slurm.wait(training.job, "PENDING", "COMPLETED")
    step, redone = max(training.steps, default=0), training.to_do_again
    print(f"{event}, {node}, at {share:.2f}: {ended} at step {step}, {redone} to do again")
    if ended == "PENDING":
        assert redone <= maximum, slurm.told(training.job)
        slurm.hurry(training.job)
    else:
        assert share > 0.8, "it was not stopped"  # later it may have been done before
    # A run that was done is not begun again.
    _must_be(training, complete(3), restarts=int(ended == "PENDING" and step < STEPS))
    assert training.summary["steps_redone"] == redone
