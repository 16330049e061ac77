"""A tracker that raises, hangs or has no room: training goes on, and the rows lost are counted."""

from __future__ import annotations

import logging
import os
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import trackers

import hpctrain as ht
from hpctrain.core.errors import HpctrainError, RankKilled, RecoveryError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.training.loggers import feed, run_loggers, to_tensorboard
from hpctrain.training.loggers.loggers import CSV, TensorBoard
from hpctrain.training.loggers.to_wandb import WandBTracker
from hpctrain.training.loggers.tracker import Target, Tracker
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

X = np.random.default_rng(0).standard_normal((24, 4)).astype(np.float32)
ROWS = 8


class Broken(Tracker):
    """A tracker whose method `at` raises or waits until `freed`."""

    kind = "broken"

    def __init__(self, target, at: str, act):
        super().__init__(target)
        self.at, self.act = at, act

    def do(self, method: str):
        if method == self.at:
            self.act()

    def begin(self, step, has_rows):
        self.do("begin")
        return 0

    def log(self, step, values):
        self.do("log" if step > 3 else "early")

    def end(self, summary):
        self.do("end")


class Recording(Broken):
    """A tracker that appends the arguments of `begin` to a list."""

    def __init__(self, target, begins):
        super().__init__(target, "", None)
        self.begins = begins

    def begin(self, step, has_rows):
        self.begins.append((step, has_rows))
        return step


def fail(error: BaseException) -> None:
    raise error


def fit(callbacks, steps=2, out=None):
    """Train on one rank, a thread, with a row per step; return the summary."""

    def body(link):
        model, world = ht.nn.Model([ht.nn.Linear(3)], 4), over_threads(link)
        with ht.Trainer(model, "sgd", callbacks=callbacks, world=world) as trainer:
            samples, options = (X, X[:, :3].argmax(1)), ht.FitOptions(interval_steps=1)
            return trainer.fit(samples, steps=steps, batch=6, out=out, options=options)

    return run_ranks(1, body)[0]


ERRORS = {
    "error": RuntimeError("no such project"),
    "disk": OSError(28, "No space left on device"),
    "exit": SystemExit(1),
}
#: rows dropped, by the method that fails; that it fails is noted in any case
DROPPED = {"begin": ROWS, "log": ROWS - 3, "end": 0}


@pytest.fixture
def freed():
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("at", DROPPED)
@pytest.mark.parametrize("act", [*ERRORS, "hang"])
def test_training_goes_on(at, act, tmp_path, monkeypatch, freed, caplog):
    action = freed.wait if act == "hang" else partial(fail, ERRORS[act])
    monkeypatch.setattr(CSV, "make_tracker", lambda self, target: Broken(target, at, action))
    monkeypatch.setattr(run_loggers, "END_S", 0.2 if act == "hang" else 30.0)
    out = tmp_path / "run"
    before = {*threading.enumerate()}
    with caplog.at_level(logging.WARNING, "hpctrain.training.loggers"):
        summary = fit([CSV()], ROWS, out=out)
    assert [row["step"] for row in run_folder.rows(out)] == [*range(1, ROWS + 1)]
    assert run_folder.read_summary(out) == summary | {"loggers": summary["loggers"]}
    (counts,) = summary["loggers"]
    assert (summary["status"], counts["rows"], counts["dropped"]) == ("done", ROWS, DROPPED[at])
    fault = "not done 0." if act == "hang" else str(ERRORS[act])
    assert fault in counts["fault"]
    messages = [record.getMessage() for record in caplog.records]
    assert sum(counts["fault"] in text for text in messages) == 1 + bool(DROPPED[at])
    if DROPPED[at]:
        assert f"{DROPPED[at]} of {ROWS} rows dropped" in messages[-1]
    freed.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(30)


def test_rows_that_find_the_queue_full_are_dropped_at_once(tmp_path, monkeypatch, freed):
    monkeypatch.setattr(feed, "MOST_ROWS", 5)
    monkeypatch.setattr(
        CSV, "make_tracker", lambda self, target: Broken(target, "begin", freed.wait)
    )
    logger = CSV(tmp_path)
    for step in range(1, 100):
        logger.log({"x": step}, step)
    waiting = threading.Timer(0.2, freed.set)
    waiting.start()
    counts = logger.close()
    waiting.join()
    assert counts["rows"] == 99
    assert counts["dropped"] in (94, 95)  # the call of `begin` runs, or waits as well
    assert "5 rows wait" in counts["fault"]


def test_events_after_one_that_found_no_room_are_read(tmp_path, monkeypatch):
    counts, write = iter(range(100)), os.write

    def half(handle, data):
        return write(handle, data[: len(data) // (1 + (next(counts) == 5))])

    fake = {name: getattr(os, name) for name in ("fstat", "ftruncate", "lseek", "uname")}
    monkeypatch.setattr(to_tensorboard, "os", SimpleNamespace(write=half, SEEK_SET=0, **fake))
    logger = TensorBoard(tmp_path)
    for step in range(1, 8):
        logger.log({"x": step}, step)
    assert logger.close()["dropped"] == 1
    values = trackers.read("tensorboard", tmp_path).values["x"]
    assert len(values) == 6 and values[-1] == (7, 7.0)


def log_twice(first, second):
    with first:
        first.log({"x": 1}, 1)
        second.log({"x": 1}, 1)


WRONG = {
    "folder": (lambda path: CSV(3), "folder: expected a path, seen 3"),
    "config": (lambda path: CSV(path, config={"x": {1}}), "config: expected a dict of JSON"),
    "value": (lambda path: CSV(path).log({"x": "1"}, 1), "'x': expected a number, seen '1'"),
    "step": (
        lambda path: CSV(path).log({"x": 1}, 0),
        "step: expected 1 or more, as an integer, seen 0",
    ),
    "float step": (lambda path: CSV(path).log({"x": 1}, 2.0), r"seen 2\.0 of type float"),
    "named step": (lambda path: CSV(path).log({"step": 1}, 1), "'step' is the number of the step"),
    "no folder": (lambda path: CSV().log({"x": 1}, 1), "ht.loggers.CSV needs a folder"),
    "fit without": (lambda path: fit([CSV()]), "ht.loggers.CSV needs a folder"),
    "two": (lambda path: fit([CSV(path), CSV(path)]), "two loggers write to"),
    "two in a loop": (lambda path: log_twice(CSV(path), CSV(path)), "two loggers write to"),
    "another run": (lambda path: (path / "csv").mkdir() or fit([CSV(path)]), "holds another run"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_use_is_refused(wrong, tmp_path):
    call, text = WRONG[wrong]
    with pytest.raises(UsageError, match=text):
        call(tmp_path)


def fit_with_loss(victim: int, folder, out, **elastic) -> list:
    """Train on two ranks with a CSV in `folder`; rank `victim` is lost at the row of step 4."""

    def body(link):
        world = over_threads(link)

        def die(row):
            if row["step"] == 4 and link.rank == victim:
                raise RankKilled

        model, callbacks = ht.nn.Model([ht.nn.Linear(3)], 4), [CSV(folder), die]
        with ht.Trainer(model, "sgd", callbacks=callbacks, world=world) as trainer:
            return trainer.fit(
                (X, X[:, :3].argmax(1)),
                steps=6,
                batch=6,
                out=out,
                options=ht.FitOptions(interval_steps=1),
                elastic=ht.ElasticOptions(**elastic),
            )

    return run_ranks(2, body, 60.0, {0: 10**9})


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_run_without_a_folder_has_no_earlier_rows(has_folder, tmp_path, monkeypatch):
    begins = []
    monkeypatch.setattr(CSV, "make_tracker", lambda self, target: Recording(target, begins))
    summary = fit_with_loss(0, tmp_path, tmp_path / "run" if has_folder else None)[1]
    assert summary["status"] == "done"
    assert begins[0] == (0, True)
    assert len(begins) == 2 and begins[1][0] > 0 and begins[1][1] == has_folder


def test_a_run_that_cannot_go_on_ends_its_log(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(RecoveryError):
        fit_with_loss(1, tmp_path, run, min_ranks=2)
    summary = run_folder.read_summary(run)
    (counts,) = summary["loggers"]
    assert (counts["kind"], counts["dropped"]) == ("csv", 0)
    assert trackers.read("csv", tmp_path).summary == {"status": "failed"} | {
        name: summary[name] for name in ("exit_code", "reason")
    }


@pytest.mark.parametrize("name", ["3f2a9c1d", "my-run-2"])
def test_wandb_goes_on_under_its_id(name, tmp_path, monkeypatch):
    used = {}
    fake = SimpleNamespace(Settings=dict, setup=id, init=lambda **options: used.update(options))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    (tmp_path / f"wandb/offline-run-20261128_001500-{name}").mkdir(parents=True)
    assert WandBTracker(Target(tmp_path, "mine", "run", {})).begin(3, has_rows=True) == 0
    assert used["id"] == name


def test_a_run_that_fails_ends_its_log(tmp_path):
    def stumble(row):
        if row["step"] == 4:
            raise ValueError("planted")

    with pytest.raises(HpctrainError, match="planted"):
        fit([CSV(), stumble], 8, tmp_path / "run")
    assert trackers.read("csv", tmp_path / "run").summary["status"] == "failed"
