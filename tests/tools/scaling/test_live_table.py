"""The live table of a study: rows, the table and log lines, from statuses alone."""

from __future__ import annotations

import io
import logging
import os
from dataclasses import replace

import pytest
from studies import Times, study, write

from hpctrain.core.fitted_table import PlainConsole
from hpctrain.tools.scaling import collect
from hpctrain.tools.scaling.collect import Gap, TrialResult
from hpctrain.tools.scaling.output import live_table
from hpctrain.tools.scaling.output.live_table import FAILED, RUNNING, WAITING, LiveView, TrialStatus
from hpctrain.tools.scaling.study import StudyFolder
from hpctrain.tools.scaling.trial_recipe import Size
from hpctrain.tools.scaling.trials import runner, slurm_runner

ITEM, TWO, FOUR = Size(1), Size(2), Size(4)
OF = study((1, 2, 4), repeats=2)


def done(rate, job=None):
    return TrialStatus.from_outcome(TrialResult(rate, 1e-2, 1e-2, 0.0, 0.0, None, ("a",)), job)


def stands(*by_trial, of=OF):
    """Return the board of statuses in the order of the trials; those not named wait."""
    waiting = [TrialStatus()] * (len(of.trials) - len(by_trial))
    return dict(zip(of.trials, [*by_trial, *waiting], strict=True))


def told(rows):
    """Return each row in short: state, repeats done, step, rate, efficiency."""
    return [(r.state, r.measured, r.step, r.samples_per_s, r.efficiency) for r in rows]


WAITS = ("2 waiting", 0, None, None, None)
BOARDS = {
    "nothing yet": (stands(), [WAITS] * 3),
    "one runs": (
        stands(done(100.0), TrialStatus(RUNNING, step=120)),
        [("1 waiting", 1, None, 100.0, 1.0), ("1 running, 1 waiting", 0, 120, None, None), WAITS],
    ),
    # a pass that is slow as a whole is no bad scaling: ratios are those within a repeat
    "means so far": (
        stands(done(100.0), done(150.0), done(200.0), done(50.0), done(75.0)),
        [
            ("measured", 2, None, 75.0, 1.0),
            ("measured", 2, None, 112.5, 0.75),
            ("1 waiting", 1, None, 200.0, 0.5),
        ],
    ),
    "the smallest may still come": (
        stands(TrialStatus("pending", 7), done(150.0)),
        [("1 pending, 1 waiting", 0, None, None, None), ("1 waiting", 1, None, 150.0, None), WAITS],
    ),
    "the smallest failed": (
        stands(TrialStatus(FAILED), done(150.0), done(200.0), TrialStatus(FAILED)),
        [
            ("2 failed", 0, None, None, None),
            ("1 waiting", 1, None, 150.0, 1.0),
            ("1 waiting", 1, None, 200.0, pytest.approx(2 / 3)),
        ],
    ),
}


@pytest.mark.parametrize("name", BOARDS)
def test_rows(name):
    statuses, rows = BOARDS[name]
    assert told(live_table.rows(OF, statuses)) == rows


def drawn(of, statuses, note=""):
    out = io.StringIO()
    PlainConsole(file=out, width=150).print(live_table.table(of, statuses, "a [b]title[/b]", note))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_the_table_of_a_study_on_slurm():
    of = replace(OF, on="slurm", sizes=(ITEM, Size(2, 2)))
    pending = TrialStatus("pending", 19, reason="Resources: waits for nodes to become free")
    running = TrialStatus(RUNNING, 20, step=60)
    message = drawn(
        of, stands(done(1234.5, 17), running, done(1234.5, 18), pending, of=of), "[i]now"
    )
    assert message[0] == "a [b]title[/b]"  # names are no markup
    assert message[2].split(" ┃ ") == [
        "┃ ranks", "nodes", "state", "job", "repeats", "step", "samples/s", "efficiency",
        "reason ┃",
    ]  # fmt: skip
    assert message[4] == "│ 1 │ 1 │ measured │ 17, 18 │ 2 of 2 │ - │ 1,234 │ 100.0% │ │"
    assert message[5] == (
        "│ 2 │ 2 │ 1 running, 1 pending │ 20, 19 │ 0 of 2 │ 60 of 121 │ - │ - "
        "│ Resources: waits for nodes to become free │"
    )
    assert message[-1] == "[i]now"


def test_a_table_without_slurm_has_no_jobs_and_no_nodes():
    assert drawn(OF, stands())[2].split(" ┃ ")[:3] == ["┃ ranks", "state", "repeats"]


def test_a_log_has_a_line_for_each_change_and_none_for_steps():
    before = stands(TrialStatus("pending", 1, reason="Priority"), TrialStatus(RUNNING, 2, step=10))
    assert (
        list(live_table.change_lines(OF, {}, stands())) == []
    )  # that trials wait goes without saying
    assert list(live_table.change_lines(OF, {}, before)) == [
        (logging.INFO, "1 rank, repeat 1 of 2: pending, job 1, Priority"),
        (logging.INFO, "2 ranks, repeat 1 of 2: running, job 2"),
    ]
    further = before | {(0, TWO): TrialStatus(RUNNING, 2, step=20)}
    assert list(live_table.change_lines(OF, before, further)) == []
    ended = before | {
        (0, ITEM): done(100.0, 1),
        (0, TWO): TrialStatus.from_outcome(Gap("out of memory"), 2),
    }
    assert list(live_table.change_lines(OF, further, ended)) == [
        (logging.INFO, "1 rank, repeat 1 of 2: 100 samples/s, efficiency so far 100.0%"),
        (logging.WARNING, "2 ranks, repeat 1 of 2: out of memory"),
    ]
    alike = stands(
        *[TrialStatus("pending", job) for job in range(4)], of=replace(OF, sizes=(ITEM, TWO))
    )
    assert [text for _, text in live_table.change_lines(OF, {}, alike)] == [
        "1 rank, repeats 1, 2 of 2: pending, jobs 0, 2",
        "2 ranks, repeats 1, 2 of 2: pending, jobs 1, 3",
    ]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_terminal_shows_the_table_as_it_changes(stopped, monkeypatch, caplog):
    out = io.StringIO()
    terminal = PlainConsole(file=out, force_terminal=True, width=120, height=40)
    monkeypatch.setattr("hpctrain.core.progress.console", lambda: terminal)
    caplog.set_level(logging.INFO, "hpctrain")
    try:
        with LiveView(OF) as view:
            view.show_activity("pilot on 1 rank")
            view.log_line(logging.INFO, "# a sentence")
            view.set_study(OF, stands(done(100.0)))
            view.update({(0, TWO): TrialStatus(RUNNING, step=60)})
            view.update({(0, TWO): done(150.0)})
            if stopped:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not out.getvalue().endswith("\x1b[2K")  # the table stays
    for words in ("pilot on 1 rank", "# a sentence", "60 of 121", "75.0%", "min left"):
        assert words in out.getvalue()
    assert caplog.records == []
    assert out.getvalue().endswith("\x1b[2K") is not stopped  # else that of the results follows


def test_who_looks_on_sees_what_runs(tmp_path):
    folder, of = StudyFolder(tmp_path), study((1, 2), repeats=2)
    assert {item.state for item in runner.current_statuses(folder, of).values()} == {WAITING}
    write(folder.trial(ITEM, 0), of.timing, Times(1e-2, 9e-3), 128, 1)
    for age, out in enumerate([folder.trial(ITEM, 1), folder.trial(TWO, 0)]):
        out.mkdir(parents=True)
        collect.run_folder.append_row(out, {"step": 30})
        collect.log_path(out).write_text("hpctrain: no such thing\n")
        os.utime(collect.log_path(out), (0, 1000 - age))
    observed = runner.current_statuses(folder, of)
    assert [observed[key].state for key in of.trials] == ["measured", FAILED, RUNNING, WAITING]
    assert (observed[0, TWO].reason, observed[1, ITEM].step) == ("no such thing", 30)


def test_slurm_states_in_words(tmp_path):
    pending = slurm_runner.JobState("17", "PENDING", "Resources")
    assert slurm_runner.status(tmp_path, pending) == TrialStatus(
        "pending", 17, reason="Resources: waits for nodes to become free"
    )
    collect.run_folder.append_row(tmp_path, {"step": 30})
    assert slurm_runner.status(tmp_path, slurm_runner.JobState("17", "RUNNING")) == TrialStatus(
        RUNNING, 17, 30
    )
