"""Runs that were stopped, resumed or killed are replayed too; and twenty replays end alike."""

from __future__ import annotations

import re
from functools import partial

import pytest
from ranks import run_on

from hpctrain import recipe, runs
from hpctrain.engines import replay
from hpctrain.errors import HpctrainError, Stopped
from hpctrain.stop import StopRequest

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
    body = partial(runs.train, spec, out=out, resume=resume, replay=again)
    return run_on("threads", RANKS, body)[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_was_stopped_and_resumed(tmp_path, monkeypatch, engine):
    """It was stopped within an interval, of which the log has the first part and the second."""
    looks = iter(range(10**6))
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        asked = property(lambda self: next(looks) > 60, lambda self, value: None)
        patch.setattr(StopRequest, "requested", asked, raising=False)
        train(engine, tmp_path / "run")
    whole = train(engine, tmp_path / "run", resume=True)
    again = train(engine, tmp_path / "again", again=tmp_path / "run")
    assert again["params_sha256"] == whole["params_sha256"]


def test_a_run_that_was_killed(tmp_path):
    train("ps-async", tmp_path / "run")
    path = replay.path_of(tmp_path / "run", RANKS - 1)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    told = "the log to be replayed has no steps 24 to 36 .*; was the run killed"
    with pytest.raises(HpctrainError, match=told):
        train("ps-async", tmp_path / "again", again=tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_twenty_of_twenty(tmp_path, engine):
    first = train(engine, tmp_path / "run")["params_sha256"]
    assert re.fullmatch("[0-9a-f]{64}", first)
    found = [train(engine, tmp_path / f"{i}", again=tmp_path / "run") for i in range(20)]
    assert [one["params_sha256"] for one in found] == [first] * 20
