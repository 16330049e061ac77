"""Progress: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.cluster import launch
from hpctrain.core import progress


def test_the_bar_is_drawn_where_launch_says_somebody_watches(monkeypatch, capsys):
    monkeypatch.setenv(progress.TERMINAL, "100")
    bar = progress.open_bar("digits", 0, 720)
    bar.show(360, 30, 0.1234, 56_789.0)
    bar.close(720)
    message = capsys.readouterr().err
    for word in ("digits", "epoch 30", "360/720", "loss 0.1234", "56,789 samples/s", "720/720"):
        assert word in message


def test_no_bar_is_drawn_before_the_lines_that_are_logged_at_the_start(monkeypatch, capsys):
    monkeypatch.setenv(progress.TERMINAL, "100")
    bar = progress.open_bar("digits", 0, 720)
    assert capsys.readouterr().err == ""
    bar.close(0)
    assert "0/720" in capsys.readouterr().err


def test_without_a_terminal_there_is_no_bar(monkeypatch):
    monkeypatch.setenv(progress.TERMINAL, "")
    assert progress.open_bar("digits", 0, 720) is None


FIT = """
import logging
import numpy as np, hpctrain as ht
{0}
x = np.eye(64, dtype="f4")
model = ht.nn.Model([ht.nn.Linear(2)], input_shape=64)
ht.Trainer(model, "sgd").fit((x, np.arange(64) % 2), epochs=2, batch=32)
"""
#: configuration of a script -> whether its two ranks print the lines of rank 0
SCRIPTS = {
    "none": ("", True),
    "a level": ("logging.getLogger('hpctrain').setLevel(logging.WARNING)", False),
    "a handler": ("logging.basicConfig()", False),
}


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("configuration", SCRIPTS)
def test_a_script_shows_its_progress_once(start, configuration):
    text, is_shown = SCRIPTS[configuration]
    ended = start("-c", FIT.format(text), ranks=2).finish()
    for line in ("training: allreduce", "step 4/4  epoch 2", "training: done"):
        assert ended.stderr.count(line) == is_shown, ended.stderr


@pytest.mark.parametrize(
    ("watched", "columns", "reported"), [(True, 120, "120"), (True, 0, "80"), (False, 120, None)]
)
def test_launch_tells_the_width(monkeypatch, watched, columns, reported):
    monkeypatch.setattr(launch.os, "isatty", lambda _: watched)
    size = launch.os.terminal_size((columns, 0))
    monkeypatch.setattr(launch.os, "get_terminal_size", lambda _: size)
    assert launch._rank_variables("announced").get(progress.TERMINAL) == reported


@pytest.mark.parametrize("text", [True, False])
def test_the_closing_table_names_what_matters(capsys, text):
    summary = {
        "recipe": "digits", "status": "done", "engine": "allreduce", "world_size": 4,
        "algorithm": "auto", "test_accuracy": 0.9778, "train_loss": None, "samples_per_s": 4e4,
        "wall_s": 2.0, "steps": 360, "since_step": 300, "compute_s": 1.0, "wait_s": 0.5,
        "wire_s": 0.7, "test_loss": np.log(4.0),
    }  # fmt: skip
    progress.console().print(progress.closing_table(summary, text))
    message = capsys.readouterr().err
    for word in (
        "digits: done",
        "4 ranks",
        "0.9778",
        "40,000",
        "1.00 s (50 %)",
        "2.00 s for the 60 steps after step 300",
    ):
        assert word in message
    assert "all-reduce: auto" in message and "wire" in message and "recoveries" not in message
    alone = summary | {"world_size": 1, "algorithm": None}
    served = summary | {"world_size": 2, "workers": 1, "servers": 1}
    progress.console().print(progress.closing_table(alone))
    assert not any(word in capsys.readouterr().err for word in ("all-reduce", "wire"))
    progress.console().print(progress.closing_table(served))
    assert "on 2 ranks, 1 worker and 1 server" in capsys.readouterr().err
    # A guess among four is worth two bits; other data than texts are not counted in bytes.
    assert ("bits per byte" in message and "2.000" in message) == text


RECOVERIES = [{"ranks": [2], "lost_s": 0.25}, {"ranks": [0, 3], "lost_s": 0.5}]
#: entries of a summary -> the words on its losses
LOSSES = {
    "none": ({"recoveries": [], "lost_s": 0.0, "ettr": 1.0, "spares_used": 0}, ""),
    "of an older version": ({}, ""),
    "two": (
        {"recoveries": RECOVERIES, "lost_s": 0.75, "ettr": 0.9925, "spares_used": 1},
        "3 ranks lost, 0.75 s without progress, 1 spare used, ETTR 99.25 %",
    ),
    "incomplete": ({"recoveries": RECOVERIES[:1]}, "1 rank lost"),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_are_summed_in_a_line(kind):
    summary, words = LOSSES[kind]
    assert progress.describe_losses(summary) == words


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_the_closing_table_has_the_losses_at_any_width(columns, monkeypatch, capsys):
    monkeypatch.setenv(progress.TERMINAL, str(columns))
    summary = {
        "recipe": "digits", "status": "done", "engine": "allreduce", "world_size": 4,
        "algorithm": None, "train_loss": None, "samples_per_s": 4e4, "wall_s": 100.0,
        "steps": 360, "compute_s": 1.0, "wait_s": 0.5, "wire_s": 0.7, **LOSSES["two"][0],
    }  # fmt: skip
    progress.console().print(progress.closing_table(summary))
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= columns + len("\x1b[3m\x1b[0m")
    cells = " ".join(line.split("│")[2].strip() for line in lines if line.count("│") == 3)
    assert LOSSES["two"][1] in cells


@pytest.mark.parametrize(
    "ranks, words", [(None, ""), ([3], "lost rank 3"), ([1, 4], "lost ranks 1, 4")]
)
def test_a_line_of_the_log_names_lost_ranks(ranks, words):
    row = {"step": 10, "epoch": 1, "train_loss": 0.5, "samples_per_s": 1.0, "lost_ranks": ranks}
    assert progress.line(row, 20).endswith(words or "samples/s")
