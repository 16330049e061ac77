"""Parameter servers as processes: lost, stopped or failing ranks leave no rank waiting."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from jobs import command_that_resumes, sets
from ranks import run_on

from hpctrain import watch
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe, runs

pytestmark = [pytest.mark.processes, pytest.mark.either]

RANKS = 3
KEYS = sets(checkpoint_every_steps=5, checkpoint_every_epochs="")
LONG = [*KEYS, *sets(run_epochs=5000)]
full = partial(pytest.param, marks=pytest.mark.full)
# Keys of the engine, and the rank that is hit: the last one serves
KILLED = [
    pytest.param({"kind": "ps-async"}, 2, id="ps-async, server"),
    full({"kind": "ps-async"}, 1, id="ps-async, worker"),
    full({"kind": "ps-sync"}, 2, id="ps-sync, server"),
    full({"kind": "ps-sync"}, 1, id="ps-sync, worker"),
    full({"kind": "ps-async", "placement": "colocated", "servers": 2}, 2, id="colocated"),
    full({"kind": "easgd"}, 2, id="easgd, server"),
    full({"kind": "gossip"}, 1, id="gossip, passive"),
]
REQUESTED = [
    pytest.param({"kind": "ps-sync"}, id="ps-sync"),
    full({"kind": "ps-async"}, id="ps-async"),
    full({"kind": "easgd"}, id="easgd"),
]


def keys_of(engine: dict[str, object]) -> list[str]:
    return sets(**{f"engine_{key}": value for key, value in engine.items()})


def hit(job, rank: int, number: int) -> None:
    """Send a signal to `rank`, as soon as there are two checkpoints."""
    job.reach(10, RANKS)
    os.kill(watch.read_records(job.out / "watch")[rank].pid, number)


@pytest.mark.parametrize("engine, rank", KILLED)
def test_a_lost_rank_ends_the_job_and_its_checkpoint_goes_on(digits, small, engine, rank):
    job = digits(*LONG, *keys_of(engine), ranks=RANKS, launch=True)
    hit(job, rank, signal.SIGKILL)
    ended = job.finish()
    assert ended.returncode == 1
    assert command_that_resumes(ended.stderr)[-3:] == ["--out", str(job.out), "--resume"]
    last = job.steps[-1]
    short = sets(run_epochs="", run_steps=last + 20)
    spec = recipe.load("digits", [*small, *KEYS, *keys_of(engine), *short][1::2])
    body = partial(runs.train, spec, out=job.out, resume=True)
    summary = run_on("threads", RANKS, body)[0]
    assert (summary["status"], summary["steps"]) == ("done", last + 20)


@pytest.mark.parametrize("engine", REQUESTED)
def test_a_server_that_is_asked_to_stop(digits, engine):
    job = digits(*LONG, *keys_of(engine), ranks=RANKS)
    hit(job, RANKS - 1, signal.SIGUSR1)
    ended = job.finish()
    assert ended.returncode == 75, ended.stderr
    assert job.summary["status"] == "stopped"
    assert job.summary["steps"] == job.steps[-1]


BREAKS = """
from itertools import count
from hpctrain.cli import main
from hpctrain.engines.parameter_server import shard
orders, apply = count(), shard.Shard.apply
def breaking(self, order):
    if next(orders) == 20:
        raise RuntimeError("the server broke")
    apply(self, order)
shard.Shard.apply = breaking
main()
"""


def test_a_server_thread_that_breaks(start, mark, small, tmp_path):
    engine = keys_of({"kind": "ps-async", "placement": "colocated"})
    train = ["train", "digits", *small, *LONG, *engine, "--out", tmp_path / "run"]
    ended = start("-c", BREAKS, *train, ranks=RANKS, env={"HPCTRAIN_TEST_JOB": mark}).finish()
    assert ended.returncode != 0
    assert "the server broke" in ended.stderr and "in breaking" in ended.stderr
    summary = run_folder.read_summary(tmp_path / "run")
    assert "RuntimeError: the server broke" in summary["reason"] and summary["status"] == "failed"
