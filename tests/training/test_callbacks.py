"""Callbacks and early stop: called on all ranks, agreed by all, and the same after a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks, run_on
from regimes import REGIMES

from hpctrain import data, nn, optim
from hpctrain.core.errors import HpctrainError, StoppedError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest
from hpctrain.training import recipe, runs
from hpctrain.training.callbacks import EarlyStop, Run
from hpctrain.training.run_options import CheckpointOptions, FitOptions
from hpctrain.training.trainer import Trainer

EPOCH = 5  # steps: 40 samples in batches of 8


def samples(n: int = 40) -> data.Dataset:
    random = np.random.default_rng(n)
    y = np.arange(n) % 3
    return data.Dataset(random.normal(y[:, None], 1.0, (n, 4)).astype(np.float32), y)


def fit(world, callbacks, out=None, **keys):
    model = nn.Model({"out": nn.Linear(3)}, (4,))
    trainer = Trainer(model, optim.sgd(0.3), world=world, callbacks=callbacks)
    keys = {"epochs": 8, "evaluate": samples(30), **keys}
    summary = trainer.fit(samples(), batch=8, out=out, **keys)
    trainer.close()
    return summary


# Values of a metric by row (None: not made; a text: of a row before a stop), the row that stops
SERIES = {
    "falls": ("test_loss", 2, 0.0, [5, 4, 3, 2, 1], None),
    "rises": ("test_accuracy", 2, 0.0, [1, 2, 3, 4], None),
    "wrong way": ("train_accuracy", 2, 0.0, [3, 2, 1], 2),
    "min": ("train_accuracy min", 2, 0.0, [3, 2, 1], None),
    "max": ("test_loss max", 2, 0.0, [3, 2, 1], 2),
    "the same": ("test_loss", 3, 0.0, [1, 1, 1, 1], 3),
    "comes back": ("test_loss", 2, 0.0, [5, 6, 4, 6, 6], 4),
    "too little": ("test_loss", 1, 0.5, [5, 4, 3.6], 2),
    "little by little": ("test_loss", 2, 0.5, [5, 4.6, 4.4, 4.2], None),
    "rows without": ("test_loss", 2, 0.0, [5, None, 6, None, None, 6], 5),
    "cut rows": ("train_loss", 1, 0.0, [5, "9", 4, "9", 4], 4),
    "not finite": ("test_loss", 2, 0.0, [float("nan"), float("inf")], 1),
    "finite at last": ("test_loss", 2, 0.0, [float("nan"), 3, 4], None),
}


def row(step, metric, value):
    cut = {"interrupted": True} if isinstance(value, str) else {}
    return {"step": step, metric: value if value is None else float(value), **cut}


@pytest.mark.parametrize("series", SERIES)
def test_patience(series):
    metric, limit, min_delta, values, stops = SERIES[series]
    metric, direction = [*metric.split(), None][:2]
    rows = [row(step, metric, value) for step, value in enumerate(values)]
    keys = {"metric": metric, "direction": direction, "min_delta": min_delta}
    stop = EarlyStop(patience=limit, **keys)
    begin = partial(Run, None, None, None, None)
    patience = stop.on_begin(begin([]))
    requested = [bool(patience.on_row(item)) for item in rows]
    assert (requested.index(True) if any(requested) else None) == stops
    for begun in range(len(rows)):  # wherever a run was resumed
        patience = stop.on_begin(begin(rows[:begun]))
        assert [bool(patience.on_row(item)) for item in rows[begun:]] == requested[begun:]


@on_ranks(1, 3, mpi=(2,))
def test_early_stop_ends_a_run_as_done_with_a_checkpoint(ranks, tmp_path):
    out = tmp_path / "run"

    def body(world):
        folder = Path(world.gather(str(out))[0])
        stop = EarlyStop(metric="test_accuracy", patience=3, min_delta=1.0)  # none is so good
        first = fit(world, [stop], folder)
        again = fit(world, [stop], folder, resume=True)
        longer = fit(
            world, [EarlyStop(metric="test_accuracy", patience=5, min_delta=1.0)], folder,
            resume=True,
        )  # fmt: skip
        return first, again, longer, folder

    for first, again, longer, folder in ranks(body):
        assert (first["status"], first["exit_code"], first["steps"]) == ("done", 0, 4 * EPOCH)
        assert first["reason"].startswith("early stop: test_accuracy has not improved on ")
        saved = ("status", "steps", "reason", "params_sha256", "test_accuracy")
        assert [again[key] for key in saved] == [first[key] for key in saved]
        assert longer["steps"] == 6 * EPOCH and longer["reason"].endswith("in 5 values")
        assert [r["step"] for r in run_folder.rows(folder)] == [EPOCH * i for i in range(1, 7)]


@pytest.mark.parametrize("regime", ["gossip, ring", "local-sgd"])
def test_a_callback_predicts_with_one_model_on_all_ranks(regime):
    """Between two averagings, where each worker trains a model of its own."""

    def body(world):
        outputs = []
        model = nn.Model({"out": nn.Linear(3)}, (4,))
        callbacks = [lambda row: outputs.append(trainer.predict(samples().x).tobytes())]
        trainer = Trainer(model, optim.sgd(0.3), REGIMES[regime], world=world, callbacks=callbacks)
        trainer.fit(samples(), steps=4, batch=8, options=FitOptions(interval_steps=1))
        trainer.close()
        return outputs

    first, second = run_on("threads", 2, body)
    assert first == second and len(set(first)) == 4


def test_a_run_that_early_stop_lets_live_has_no_reason():
    summary = run_on("threads", 1, lambda w: fit(w, [EarlyStop(patience=8)]))[0]
    assert (summary["status"], summary["reason"], summary["steps"]) == ("done", None, 8 * EPOCH)


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [1, 6, 13, 15, 18])
def test_a_resumed_run_stops_early_where_the_whole_one_does(tmp_path, monkeypatch, at):
    keys = {"options": FitOptions(evaluate_steps=4, interval_steps=4)}
    stop = EarlyStop(metric="test_accuracy", patience=4, min_delta=1.0)
    complete = run_on("threads", 2, lambda w: fit(w, [stop], tmp_path / "whole", **keys))[0]
    assert complete["steps"] == 20
    observed = iter(range(10**6))
    monkeypatch.setattr(
        StopRequest,
        "requested",
        property(lambda s: next(observed) >= 2 * at, lambda s, v: None),
        False,
    )
    with pytest.raises(StoppedError):
        run_on("threads", 2, lambda w: fit(w, [stop], tmp_path / "cut", **keys))
    monkeypatch.undo()
    ends = run_on("threads", 2, lambda w: fit(w, [stop], tmp_path / "cut", resume=True, **keys))
    assert {item["params_sha256"] for item in ends} == {complete["params_sha256"]}
    assert {item["reason"] for item in ends} == {complete["reason"]}


@on_ranks(1, 3, mpi=(3,))
def test_rows_are_told_on_every_rank(ranks, tmp_path):
    def body(world):
        reported = []
        fit(world, [reported.append], options=FitOptions(interval_steps=2), epochs=2)
        agreed = ("step", "train_loss", "test_loss", "test_accuracy", "samples")
        return [[item[key] for key in agreed] for item in reported]

    first, *rest = ranks(body) or [[]]
    assert [item == first for item in rest] == [True] * len(rest)
    assert not first or [item[0] for item in first] == [2, 4, 5, 6, 8, 10]


# What the callback of one rank returns for row 7 -> the reason
REQUESTED = {
    "a reason": ("enough", "enough"),
    "True": (True, "callback asks.<locals>.ask asked to stop at step 7"),
    "NumPy's True": (np.bool_(True), "callback asks.<locals>.ask asked to stop at step 7"),
}


def asks(answer):
    def ask(row):
        return answer if row["step"] == 7 else None

    return ask


@pytest.mark.parametrize("requested", REQUESTED)
@on_ranks(1, 3, mpi=(3,))
def test_one_rank_asks_and_all_stop(ranks, requested):
    answer, reason = REQUESTED[requested]

    def body(world):
        own = [asks(answer)] if world.rank == world.size - 1 else []
        return fit(world, own, options=FitOptions(interval_steps=7))

    for summary in ranks(body):
        assert (summary["steps"], summary["reason"]) == (7, reason)


class Broken:
    """A callback that fails when it begins."""

    def on_begin(self, run):
        raise UsageError("not like this")


class Unsaved:
    """A callback whose state is no JSON data."""

    def save_state(self):
        return {1.0j}


# A callback of rank 0 -> what is said
WRONG = {
    "raises": (lambda row: 1 / 0, "<lambda>: ZeroDivisionError: division by zero"),
    "returns a number": (lambda row: 3, "<lambda> returned 3; expected None to go on, True or"),
    "cannot begin": (Broken(), "Broken: UsageError: not like this"),
    "takes no row": (lambda: None, "<lambda>: TypeError"),
    "saves an object": (Unsaved(), ""),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_callback_that_fails_on_one_rank(wrong):
    callback, message = WRONG[wrong]

    def body(world):
        fit(world, [callback] if world.rank == 0 else [])

    with pytest.raises(HpctrainError) as error:
        run_on("threads", 2, body)
    text = f"callback {message}" if message else "save_state of Unsaved: expected JSON data"
    assert text in str(error.value)
    assert not isinstance(error.value, UsageError)  # the time to refuse is over


# FitOptions -> the steps of rows, and those of them with an evaluation
INTERVALS = {
    "each epoch": ({}, [5, 10, 15, 20], [5, 10, 15, 20]),
    "every 3 epochs": ({"evaluate_epochs": 3}, [5, 10, 15, 20], [15, 20]),
    "every 8 steps": ({"evaluate_steps": 8}, [5, 8, 10, 15, 16, 20], [8, 16, 20]),
    "rows too": ({"evaluate_epochs": 2, "interval_steps": 9}, [5, 9, 10, 15, 18, 20], [10, 20]),
}


@pytest.mark.parametrize("interval", INTERVALS)
def test_when_the_model_is_evaluated(tmp_path, interval):
    keys, steps, tested = INTERVALS[interval]
    options = FitOptions(**keys)
    run_on("threads", 2, lambda w: fit(w, [], tmp_path / "run", epochs=4, options=options))
    rows = run_folder.rows(tmp_path / "run")
    assert [item["step"] for item in rows] == steps
    assert [item["step"] for item in rows if item["test_loss"] is not None] == tested
    assert all(("test_accuracy" in item) and item["train_loss"] > 0 for item in rows)


# Keys of fit and its callbacks -> what is said
REFUSED = {
    "both": (
        [],
        {"options": FitOptions(evaluate_epochs=1, evaluate_steps=1)},
        "evaluate_epochs or evaluate_steps",
    ),
    "no test set": ([EarlyStop(patience=1)], {"evaluate": None}, "needs test_loss, but there"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(tmp_path, wrong):
    callbacks, keys, message = REFUSED[wrong]
    with pytest.raises(UsageError, match=message):
        run_on("threads", 2, lambda w: fit(w, callbacks, tmp_path / "run", **keys))
    assert not (tmp_path / "run").exists()


def test_early_stop_on_the_training_loss_needs_no_test_set():
    stop = EarlyStop(metric="train_loss", patience=2, min_delta=100.0)
    summary = run_on("threads", 2, lambda w: fit(w, [stop], evaluate=None))[0]
    assert summary["steps"] == 3 * EPOCH


def test_a_recipe_stops_early_and_is_evaluated_when_it_says(tmp_path):
    spec = recipe.load("digits", [
        "model.widths=[64,16,10]", "run.epochs=9", "run.evaluate_steps=5", "early_stop.patience=3",
        "early_stop.metric=test_accuracy", "early_stop.min_delta=1.0"])  # fmt: skip
    summary = run_on("threads", 2, lambda w: runs.train(spec, w, tmp_path / "run", False))[0]
    assert (summary["steps"], summary["status"]) == (20, "done")
    tested = [item["step"] for item in run_folder.rows(tmp_path / "run") if item["test_loss"]]
    assert tested == [5, 10, 15, 20]


@pytest.mark.parametrize("keys", [{}, {"patience": 0}, {"patience": 1, "metric": "loss"},
                                  {"patience": 1, "direction": "up"},
                                  {"patience": 1, "min_delta": -1.0},
                                  {"patience": 1, "min_delta": float("nan")}])  # fmt: skip
def test_options_are_checked_in_code_too(keys):
    with pytest.raises(UsageError):
        EarlyStop(**keys)


class Record:
    """A callback with all hooks that records their calls."""

    def __init__(self, stop_epoch=None, end_fails=False):
        self.calls, self.stop_epoch, self.end_fails = [], stop_epoch, end_fails

    def on_begin(self, run):
        self.run = run
        self.calls.append(("begin", len(run.rows)))

    def on_row(self, row):
        self.calls.append(("row", row["step"]))

    def on_epoch(self, row):
        self.calls.append(("epoch", row["step"]))
        return "enough" if row["step"] == self.stop_epoch else None

    def on_checkpoint(self, folder):
        assert (folder / "manifest.json").exists()
        self.calls.append(("checkpoint", int(folder.name.removeprefix("step-"))))

    def on_end(self, summary):
        self.calls.append(("end", summary["status"], summary["steps"]))
        if self.end_fails:
            raise ValueError("at the end")


@on_ranks(2, mpi=(2,))
def test_hooks_are_called_in_order_with_the_run(ranks, tmp_path):
    def body(world):
        folder = Path(world.gather(str(tmp_path / "run"))[0])
        record = Record(stop_epoch=10) if world.rank == 0 else None
        keys = {"options": FitOptions(interval_steps=3), "epochs": 4}
        summary = fit(world, [record] if record else [], folder, **keys,
                      checkpoints=CheckpointOptions(every_steps=5))  # fmt: skip
        again = Record(stop_epoch=10) if world.rank == 0 else None
        fit(world, [again] if again else [], folder, resume=True, **keys)
        if record is None:
            return None
        weights = record.run.parameters["out.weight"]
        facts = weights.shape, record.run.folder == folder, record.run.world is world
        return record.calls, again.calls, summary["reason"], facts

    for first in filter(None, ranks(body)):
        calls, again, reason, facts = first
        assert calls == [
            ("begin", 0), ("row", 3), ("row", 5), ("epoch", 5), ("checkpoint", 5), ("row", 6),
            ("row", 9), ("row", 10), ("epoch", 10), ("checkpoint", 10), ("end", "done", 10),
        ]  # fmt: skip
        assert again == [("begin", 4), ("row", 10), ("epoch", 10), ("end", "done", 10)]
        assert (reason, facts) == ("enough", ((4, 3), True, True))


class Count:
    """A callback that counts the rows of all parts of a run."""

    def on_begin(self, run):
        self.begin = run.state, len(run.rows)
        self.rows = run.state or 0

    def on_row(self, row):
        self.rows += 1

    def save_state(self):
        return self.rows


def test_a_resumed_run_has_the_state_before_the_last_row(tmp_path):
    """It is saved with each checkpoint."""

    def body(world):
        counts = [Count(), Count()]
        for epochs, count in zip((4, 6), counts, strict=True):
            fit(world, [count], tmp_path / "run", resume=True, epochs=epochs)
        return [(count.begin, count.rows) for count in counts]

    assert run_on("threads", 2, body) == [[((None, 0), 4), ((3, 3), 6)]] * 2


def test_the_end_of_a_stopped_run_is_reported(tmp_path, monkeypatch):
    record = Record(end_fails=True)  # its fault does not hide the stop
    monkeypatch.setattr(
        StopRequest, "requested", property(lambda s: True, lambda s, v: None), False
    )
    with pytest.raises(StoppedError):
        run_on("threads", 1, lambda w: fit(w, [record], tmp_path / "run"))
    assert record.calls[-1][:2] == ("end", "stopped")


WITHOUT_HOOKS = {"a number": 3, "an object": object(), "a module": np}


@pytest.mark.parametrize("wrong", WITHOUT_HOOKS)
def test_an_object_without_hooks_is_refused(wrong):
    with pytest.raises(UsageError, match="expected a function, or an object with one of on_begin"):
        run_on("threads", 1, lambda w: fit(w, [WITHOUT_HOOKS[wrong]]))


MODULE = """
lines = []

def log(row):
    lines.append(("log", row["step"]))

def log_every(steps, prefix="log"):
    def log(row):
        if row["step"] % steps == 0:
            lines.append((prefix, row["step"]))
    return log

class Hooks:
    def __init__(self, prefix="class"):
        self.prefix = prefix
    def on_epoch(self, row):
        lines.append((self.prefix, row["step"]))
"""
# an entry of [run] callbacks -> the lines of rank 0, and whether rank 1 has them too
IN_RECIPES = {
    "a function": ('"own_{n}:log"', [("log", 3), ("log", 6)], False),
    "on all ranks": ('{{kind="own_{n}:log", ranks="all"}}', [("log", 3), ("log", 6)], True),
    "a class": ('"own_{n}:Hooks"', [("class", 3), ("class", 6)], False),
    "a class with arguments": (
        '{{kind="own_{n}:Hooks", arguments={{prefix="x"}}}}', [("x", 3), ("x", 6)], False,
    ),
    "a function with arguments": (
        '{{kind="own_{n}:log_every", arguments={{steps=6}}, ranks="all"}}', [("log", 6)], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("number, case", list(enumerate(IN_RECIPES)))
def test_callbacks_of_recipes(tmp_path, monkeypatch, number, case):
    entry, expected, on_all = IN_RECIPES[case]
    (tmp_path / f"own_{number}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    spec = recipe.load("digits", [
        f"run.callbacks=[{entry.format(n=number)}]", "run.epochs=2", "run.epoch_samples=384",
        "model.widths=[64,16,10]"])  # fmt: skip
    run_on("threads", 2, lambda w: runs.train(spec, w, tmp_path / "run", False))
    lines = __import__(f"own_{number}").lines
    assert sorted(lines) == sorted(expected * (2 if on_all else 1))
    assert recipe.load(str(tmp_path / "run/recipe.toml")).run == spec.run


WRONG_ENTRIES = {
    '{kinds="a:b"}': "unknown key in [run.callbacks]: 'kinds'; did you mean 'kind'?",
    '{kind="a:b", ranks="none"}': "[run.callbacks] ranks",
    "{}": "[run.callbacks] kind is missing",
}


@pytest.mark.parametrize("entry", WRONG_ENTRIES)
def test_a_wrong_entry_is_refused(entry):
    with pytest.raises(UsageError) as error:
        recipe.load("digits", [f"run.callbacks=[{entry}]"])
    assert WRONG_ENTRIES[entry] in str(error.value)


def test_arguments_are_checked(tmp_path, monkeypatch):
    (tmp_path / "own_checked.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    entry = '{kind="own_checked:log_every", arguments={step=6}}'
    spec = recipe.load("digits", [f"run.callbacks=[{entry}]"])
    with pytest.raises(UsageError, match=r"own_checked:log_every'.*did you mean 'steps'"):
        run_on("threads", 1, lambda w: runs.train(spec, w, tmp_path / "run", False))
