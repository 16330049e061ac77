"""What people see: a bar where somebody watches, nothing where a log is written."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.cluster import launch
from hpctrain.core import progress


@pytest.mark.parametrize(("terminal", "drawn"), [("100", True), ("", False)])
def test_the_bar_is_drawn_where_launch_says_somebody_watches(monkeypatch, capsys, terminal, drawn):
    monkeypatch.setenv(progress.TERMINAL, terminal)
    bar = progress.Bar("digits", 0, 720, visible=True)
    bar.show(360, 30, 0.1234, 56_789.0)
    bar.close(720)
    said = capsys.readouterr().err
    assert bar.drawn == drawn
    for word in ("digits", "epoch 30", "360/720", "loss 0.1234", "56,789 samples/s", "720/720"):
        assert (word in said) == drawn


def test_ranks_that_do_not_speak_draw_nothing(monkeypatch, capsys):
    monkeypatch.setenv(progress.TERMINAL, "100")
    bar = progress.Bar("digits", 0, 720, visible=False)
    bar.show(360, 30, 0.1234, 56_789.0)
    bar.close(720)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("watched", "columns", "told"), [(True, 120, "120"), (True, 0, "80"), (False, 120, None)]
)
def test_launch_tells_the_width(monkeypatch, watched, columns, told):
    monkeypatch.setattr(launch.os, "isatty", lambda _: watched)
    size = launch.os.terminal_size((columns, 0))
    monkeypatch.setattr(launch.os, "get_terminal_size", lambda _: size)
    assert launch._rank_variables("announced").get(progress.TERMINAL) == told


@pytest.mark.parametrize("text", [True, False])
def test_the_closing_table_names_what_matters(capsys, text):
    summary = {
        "recipe": "digits", "status": "done", "engine": "allreduce", "world_size": 4,
        "algorithm": "auto", "test_accuracy": 0.9778, "train_loss": None, "samples_per_s": 4e4,
        "wall_s": 2.0, "steps": 360, "since_step": 300, "compute_s": 1.0, "wait_s": 0.5,
        "wire_s": 0.7, "test_loss": np.log(4.0),
    }  # fmt: skip
    progress.console().print(progress.closing_table(summary, text))
    said = capsys.readouterr().err
    for word in (
        "digits: done",
        "4 ranks",
        "0.9778",
        "40,000",
        "1.00 s (50 %)",
        "2.00 s for the 60 steps after step 300",
    ):
        assert word in said
    # A guess among four is worth two bits; other data than texts are not counted in bytes.
    assert ("bits per byte" in said and "2.000" in said) == text
