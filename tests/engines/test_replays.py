"""Replays of runs that were stopped, resumed or killed; twenty replays end with the same bytes."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest
from ranks import run_on

from hpctrain.core.errors import HpctrainError, StoppedError
from hpctrain.core.signals import StopRequest
from hpctrain.engines import replay
from hpctrain.training import recipe, runs

RANKS = 4
KEYS = ["model.widths=[64,12,10]", "run.epochs=3", "faults.step_ms=0.2", "faults.jitter=1.0"]
ENGINES = {
    "ps-async": ["engine.kind=ps-async"],
    "bounded": ["engine.kind=ps-async", "engine.staleness=1", "engine.placement=colocated"],
    "compensated": ["engine.kind=ps-async", "engine.delay_compensation=0.1", "engine.servers=2"],
    "backup": ["engine.kind=ps-sync", "engine.backup_workers=1"],
    "easgd": ["engine.kind=easgd", "engine.period=3"],
    "gossip": ["engine.kind=gossip"],
}


def train(engine, out, resume=False, again=None):
    """Return the summary of a run, or of the repetition of the run in folder `again`."""
    spec = recipe.load("digits", [*KEYS, *ENGINES[engine]])

    def body(world):
        threading.current_thread().name = f"rank {world.rank}"
        return runs.train(spec, world, out, resume, again)

    return run_on("threads", RANKS, body)[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_was_stopped_and_resumed(tmp_path, monkeypatch, engine):
    """It was stopped within an interval, of which the log has the first part and the second."""
    looks = iter(range(10**6))
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        requested = property(lambda self: next(looks) > 60, lambda self, value: None)
        patch.setattr(StopRequest, "requested", requested, raising=False)
        train(engine, tmp_path / "run")
    complete = train(engine, tmp_path / "run", resume=True)
    again = train(engine, tmp_path / "again", again=tmp_path / "run")
    assert again["params_sha256"] == complete["params_sha256"]


class AfterOneGradient:
    """Asks rank 0 for a stop when it has begun a gradient; other workers begin after that."""

    def __init__(self, workers):
        self.looks, self.asked = 0, threading.Event()
        self.waiting = {f"rank {worker}" for worker in range(1, workers)}

    def __get__(self, request, kind=None):
        rank = threading.current_thread().name
        if rank == "rank 0":
            self.looks += 1
            if self.looks == 2:
                self.asked.set()
            return self.looks >= 2
        if rank in self.waiting:
            self.waiting.remove(rank)
            self.asked.wait(10)
            time.sleep(0.3)  # until the first server has heard of it
        return False

    def __set__(self, request, value):
        """Take no note."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("engine", "workers"), [("ps-async", RANKS - 1), ("gossip", RANKS)])
def test_a_run_that_was_stopped_before_all_had_done_a_step(tmp_path, monkeypatch, engine, workers):
    """Worker 0 has changed the parameters, but the run is at the step where it was."""
    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(StopRequest, "requested", AfterOneGradient(workers), raising=False)
        train(engine, tmp_path / "run")
    server = replay.log_path(tmp_path / "run", workers % RANKS)
    (_, interval) = map(json.loads, server.read_text().splitlines())
    assert (interval["start"], sum(interval["clocks"])) == (0, 1)
    complete = train(engine, tmp_path / "run", resume=True)
    starts = [json.loads(line).get("start") for line in server.read_text().splitlines()]
    assert starts[1:3] == [0, 0]
    again = train(engine, tmp_path / "again", again=tmp_path / "run")
    assert again["params_sha256"] == complete["params_sha256"]


def test_a_run_that_was_killed(tmp_path):
    train("ps-async", tmp_path / "run")
    path = replay.log_path(tmp_path / "run", RANKS - 1)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    reported = "the log to be replayed has no steps 24 to 36 .*; was the run killed"
    with pytest.raises(HpctrainError, match=reported):
        train("ps-async", tmp_path / "again", again=tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_twenty_of_twenty(tmp_path, engine):
    first = train(engine, tmp_path / "run")["params_sha256"]
    assert re.fullmatch("[0-9a-f]{64}", first)
    result = [train(engine, tmp_path / f"{i}", again=tmp_path / "run") for i in range(20)]
    assert [item["params_sha256"] for item in result] == [first] * 20
