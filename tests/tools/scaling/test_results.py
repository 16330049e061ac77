"""From simulated trials to tables, files and plots; gaps; the order of trials; repeated calls."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import BROWSER, LOOK, browse, painted
from click import Abort
from matplotlib import image
from studies import SUBJECT, Times, runner, study, write

from hpctrain.cluster.launch import MpiInstallation
from hpctrain.commands.scale import scale
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import PlainConsole
from hpctrain.core.run_files import run_folder
from hpctrain.tools.scaling import collect, command, statistics
from hpctrain.tools.scaling.collect import Gap, TrialResult
from hpctrain.tools.scaling.output import plots, tables
from hpctrain.tools.scaling.output.live_table import LiveView
from hpctrain.tools.scaling.output.plots import page
from hpctrain.tools.scaling.results import evaluate
from hpctrain.tools.scaling.study import StudyFolder, lock_folder
from hpctrain.tools.scaling.trial_recipe import Size, Timing
from hpctrain.tools.scaling.trials import local_runner
from hpctrain.tools.scaling.trials import runner as trial_runner

GOLDEN = Path(__file__).parents[2] / "golden"
SERIAL = 0.2


def amdahl(ranks, repeat=0):
    """Return a step with the serial fraction SERIAL, all of it exposed wire; repeats drift."""
    drift, step = 1 + 0.01 * repeat, 1e-2 / statistics.amdahl_speed_up(SERIAL, ranks)
    wait = 2e-3 * (1 - 1 / ranks)
    return Times(*(drift * single for single in (step, step - wait - 1e-4, wait, wait)))


def gustafson(ranks, repeat=0):
    step = 1e-2 * ranks / statistics.gustafson_speed_up(SERIAL, ranks)
    return Times(step, 9.5e-3, step - 1e-2, step - 1e-2)


def trials(of, times, gaps=()):
    """Return made-up trials by size, without files."""
    result = {}
    for size in of.sizes:
        item = [times(size.ranks, repeat) for repeat in range(of.repeats)]
        batch = of.batch * (1 if of.mode == "strong" else size.ranks)
        result[size] = [
            Gap(f"why {repeat}")
            if (size.ranks, repeat) in gaps
            else TrialResult(batch / t.step_s, **vars(t), hosts=("a",))
            for repeat, t in enumerate(item)
        ]  # fmt: skip
    return result


@pytest.mark.parametrize("mode, times", [("strong", amdahl), ("weak", gustafson)])
def test_the_serial_fraction_of_trials(mode, times):
    of = study((1, 2, 4, 8), mode)
    result = evaluate(of, trials(of, times))
    assert result.serial.mean == pytest.approx(SERIAL)
    assert result.serial.half == pytest.approx(0, abs=1e-9)  # each repeat tells the same
    for row in result.of("measured"):
        law = statistics.amdahl_speed_up if mode == "strong" else statistics.gustafson_speed_up
        assert row["speed_up"] == pytest.approx(law(SERIAL, row["ranks"]))
        assert row["efficiency"] == pytest.approx(row["speed_up"] / row["ranks"])


def test_a_pass_that_was_slow_as_a_whole_does_not_blur_efficiency():
    of = study()
    rows = evaluate(of, trials(of, amdahl)).rows
    for row in (rows[2], rows[3]):  # the largest measured, the first that is predicted
        assert row["samples_per_s_ci95"] > 10
        assert row["efficiency_ci95"] == pytest.approx(0, abs=1e-9)


def test_predictions_are_as_uncertain_as_repeats_are_different():
    of = study((1, 2))
    same = evaluate(of, trials(of, lambda n, i: amdahl(n))).of("predicted")[0]
    other = evaluate(of, trials(of, lambda n, i: amdahl(n, 10 * i * (n > 1)))).of("predicted")[0]
    assert same["samples_per_s_ci95"] == pytest.approx(0, abs=1e-6)
    assert other["efficiency_ci95"] > 0.05
    once = replace(of, repeats=1)
    assert evaluate(once, trials(once, amdahl)).of("predicted")[0]["efficiency_ci95"] is None


def test_intervals_are_those_of_student():
    of = replace(study(), sizes=(Size(1),))
    single = Times(1e-2, 9e-3)
    rows = evaluate(of, trials(of, lambda _, i: replace(single, step_s=128 / (9 + i)))).rows
    assert rows[0]["samples_per_s"] == pytest.approx(10)
    exact = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)  # rates 9, 10, 11
    assert rows[0]["samples_per_s_ci95"] == pytest.approx(exact)


def test_what_shares_cores_is_told_and_left_out_of_the_law():
    of = replace(study((1, 2, 4)), cores=2)
    slow = evaluate(of, trials(of, lambda n, i: amdahl(n) if n < 4 else Times(1.0, 0.9)))
    assert slow.serial.mean == pytest.approx(SERIAL)
    assert [row.get("ranks_per_core") for row in slow.rows[:3]] == [1, 1, 2]
    assert "oversubscribed: 2 ranks per core" in "".join(tables.remarks(slow.rows[2]))
    assert [row["ranks"] for row in slow.of("predicted")] == [
        4,
        8,
        16,
    ]  # beyond 2, not beyond 4
    assert slow.tested and not slow.model.tested  # what shares cores was forecast, not fitted to


def test_predictions_are_said_to_be_such():
    of = study()
    result = evaluate(of, trials(of, amdahl))
    assert [row["ranks"] for row in result.of("predicted")] == [8, 16, 32]
    assert all("predicted" in list(tables.remarks(row)) for row in result.of("predicted"))
    assert "prediction_error" in result.rows[2]
    assert "prediction_error" not in result.rows[1]  # one rank alone tells nothing of two
    asynchronous = {"engine": {"kind": "ps-async"}}
    assert not evaluate(replace(of, tables=asynchronous), trials(of, amdahl)).of("predicted")
    short = replace(of, batch=8)
    assert [row["ranks"] for row in evaluate(short, trials(short, amdahl)).of("predicted")] == [8]


def text_of(result):
    out = io.StringIO()
    PlainConsole(file=out, width=200).print(tables.table(result))
    facts = [f"{name}: {text}" for name, text in tables.facts(result).items()]
    return out.getvalue() + "\n".join(facts) + "\n"


def with_gaps():
    """Return a study with a size that failed, one repeat that failed, and one without cores."""
    of = replace(study((1, 2, 4, 8)), cores=4)
    return evaluate(of, trials(of, amdahl, {(4, 2), *((2, i) for i in range(3))}))


@pytest.mark.parametrize("mode, times", [("strong", amdahl), ("weak", gustafson), ("gaps", None)])
def test_golden_tables(mode, times):
    of = study((1, 2, 4, 8), mode)
    result = with_gaps() if times is None else evaluate(of, trials(of, times))
    assert text_of(result) == (GOLDEN / f"scaling-{mode}.txt").read_text()


def test_gaps_are_named_and_the_rest_is_drawn():
    result = with_gaps()
    assert [row["ranks"] for row in result.of("gap")] == [2]
    message = {row["ranks"]: "; ".join(tables.remarks(row)) for row in result.rows}
    assert "gap: why 0" in message[2]
    assert "1 of its repeats missing: why 2" in message[4]
    assert plots.plots(result).keys() == {"scaling.png", "scaling.svg", "time.png", "time.svg"}
    assert "1 of 4 sizes not measured" in page(result, {}, [])


def test_what_few_sizes_and_repeats_cannot_tell_is_said():
    two = study((1, 2), repeats=1)
    message = tables.facts(evaluate(two, trials(two, amdahl)))
    assert "one repeat has no interval" in message["trials"]
    assert message["Amdahl's law"] == (
        "serial fraction 20.0%; the speed-up stays below 5; two sizes always fit: a third "
        "one would check it"
    )
    assert message["alpha-beta model"].endswith("2 ranks, which any such model fits: one more size "
                                             "would check it")  # fmt: skip
    apart = study((1, 2), repeats=2)  # repeats that tell opposite things
    mixed = evaluate(apart, trials(apart, lambda n, i: Times(1e-2 / (n if i else 1), 1e-3)))
    assert (
        "serial fraction 50.0% (0.0% to 100.0%); the speed-up stays below 2 (1 to no bound)"
        in (tables.facts(mixed)["Amdahl's law"])
    )
    assert "Too noisy to conclude: repeats on 2 ranks" in " ".join(tables.summary_lines(mixed))
    assert tables.facts(mixed)["noise"].startswith("too noisy to conclude: repeats on 2 ranks")
    assert tables.facts(mixed)["Amdahl's law"].endswith("; too noisy to conclude")
    ideal = evaluate(apart, trials(apart, lambda n, i: Times(1e-2 / n, 0.0)))
    assert ": no part that limits the speed-up was measured" in tables.law_text(ideal)
    slower = evaluate(apart, trials(apart, lambda n, i: Times(1e-2 * n, 1e-3)))
    assert "100%, its bound: more ranks brought no more samples/s" in tables.law_text(slower)
    four = study((1, 2, 4))
    bent = lambda n, i: Times(1e-2 if n < 4 else 1e-2 / 3, 1e-3)  # noqa: E731
    assert "of 1, 2 and 4 ranks" in tables.law_text(evaluate(four, trials(four, bent)))


def labels(result):
    texts = set()
    for axes in plots.scaling(result).axes:
        texts |= set(axes.get_legend_handles_labels()[1])
    return texts


def test_one_repeat_has_no_interval_in_the_legend():
    for repeats, label in ((1, "measured"), (3, "measured, 95 % interval")):
        of = study((1, 2, 4), repeats=repeats)
        assert label in labels(evaluate(of, trials(of, amdahl)))


def test_noise_within_the_trials_of_one_repeat_is_said():
    of = study((1, 2, 4), repeats=1)
    result = trials(of, amdahl)
    assert "noise" not in tables.facts(evaluate(of, result))
    noisy = {size: [replace(trial, spread=0.4) for trial in item] for size, item in result.items()}
    facts = tables.facts(evaluate(of, noisy))
    assert facts["noise"].startswith("too noisy to conclude: noisy: the quartiles of repeats diff")
    assert facts["Amdahl's law"].endswith("too noisy to conclude")


def test_what_a_report_begins_with():
    assert list(tables.summary_lines(with_gaps())) == [
        "Measured: 1, 4 and 8 ranks.",
        "Not measured: 2 ranks.",
        "Predicted, not measured, for ranks with cores of their own: 8, 16 and 32 ranks.",
        "4 ranks do 2.50 ± 0.00 times the samples/s of 1 rank: an efficiency of 62.5 ± 0.0%.",
    ]


def test_nothing_was_measured():
    of = study()
    result = evaluate(of, trials(of, amdahl, {(n, i) for n in (1, 2, 4) for i in range(3)}))
    assert plots.plots(result) == {}
    assert "Nothing was measured yet" in page(result, {}, [])
    assert [row["kind"] for row in result.rows] == ["gap"] * 3


def test_files_hold_all_of_it(tmp_path):
    of = study()
    result = evaluate(of, trials(of, amdahl))
    names = {path.name for path in command.write(tmp_path, result, ["as it is"], with_plots=True)}
    assert names == {path.name for path in tmp_path.iterdir()}  # and nothing half written
    reported = json.loads((tmp_path / "scaling.json").read_text())
    assert (reported["machine"]["cpu"], len(reported["rows"])) == ("made up", 6)
    assert reported["law"]["serial_fraction"]["mean"] == pytest.approx(SERIAL)
    rows = list(csv.DictReader((tmp_path / "scaling.csv").read_text().splitlines()))
    assert [row["kind"] for row in rows] == ["measured"] * 3 + ["predicted"] * 3
    assert float(rows[1]["samples_per_s"]) == pytest.approx(result.rows[1]["samples_per_s"])
    html = (tmp_path / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 2
    assert "as it is" in html


def test_names_are_no_markup(tmp_path):
    of = replace(study(), name="<b>$x_1$ [bold]</b>")
    result = evaluate(of, trials(of, amdahl))
    assert "&lt;b&gt;" in page(result, {}, []) and "<b>" not in page(result, {}, [])
    assert plots.plots(result)
    command.write(tmp_path, result, [], with_plots=False)
    assert {path.name for path in tmp_path.iterdir()} == {"scaling.json", "scaling.csv"}


def test_only_timed_rows_count(tmp_path):
    times = Times(2e-3, 1e-3, 5e-4, 8e-4)
    write(tmp_path / "run", Timing.of(100), times, 128, ranks=2)
    result = collect.read_trial(tmp_path / "run", Timing.of(100))
    assert result.samples_per_s == pytest.approx(64_000)
    observed = (result.step_s, result.compute_s, result.wire_s, result.wait_s, result.other_s)
    assert observed == pytest.approx((2e-3, 1e-3, 5e-4, 8e-4, 2e-4))
    assert result.machine == {"threads": 1}


def test_what_trials_have_seen_of_their_machine():
    of = study((1, 2), repeats=1)
    result = trials(of, amdahl)
    single, two = result.values()
    single[0] = replace(single[0], machine={"threads": 1, "gpus": ["H200"]})
    two[0] = replace(two[0], machine={"threads": 1, "gpus": ["A100"]}, hosts=("b", "a"))
    assert evaluate(of, result).machine == of.machine | {
        "hosts_seen": ["a", "b"], "threads": 1, "gpus": [["H200"], ["A100"]],
    }  # fmt: skip


def cut(run):
    rows = (run / run_folder.METRICS).read_text().splitlines()
    (run / run_folder.METRICS).write_text("\n".join(rows[:5]))


def resumed(run):
    rows = [row | {"since_step": 50 * (row["step"] > 50)} for row in run_folder.rows(run)]
    (run / run_folder.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def stopped(run):
    reported = {"status": "stopped", "reason": "stopped at step 7 as asked"}
    run_folder.write_summary(run, reported)


GAPS = {
    "cut": (cut, "3 rows in metrics.jsonl, expected 10"),
    "resumed": (resumed, "9 rows .* it was resumed on the way"),
    "stopped": (stopped, "stopped: stopped at step 7 as asked"),
    "torn": (lambda run: (run / run_folder.SUMMARY).write_text("{"), "cannot be read"),
    "no summary": (lambda run: (run / run_folder.SUMMARY).unlink(), "not run yet"),
}


@pytest.mark.parametrize("kind", GAPS)
def test_trials_that_do_not_count(kind, tmp_path):
    spoil, reason = GAPS[kind]
    write(tmp_path / "run", Timing.of(100), Times(2e-3, 1e-3), 128, ranks=2)
    spoil(tmp_path / "run")
    result = collect.read_trial(tmp_path / "run", Timing.of(100))
    assert isinstance(result, Gap)
    assert re.search(reason, result.reason)


def conducted(folder, of, monkeypatch, times=amdahl, failing=()):
    """Run a study whose trials take no time; return what was called, in order."""
    calls = []
    monkeypatch.setattr(local_runner, "run", runner(times, calls, failing))
    with LiveView(of) as view:
        list(trial_runner.trials(folder, of, SUBJECT, view))
    return calls


def test_sizes_take_turns_and_nothing_runs_twice(tmp_path, monkeypatch):
    of, folder = study(), StudyFolder(tmp_path)
    calls = conducted(folder, of, monkeypatch)
    assert calls == [(repeat, ranks) for repeat in range(3) for ranks in (1, 2, 4)]
    assert conducted(folder, of, monkeypatch) == []
    (folder.trial(Size(2), 1) / run_folder.SUMMARY).unlink()
    assert conducted(folder, of, monkeypatch) == [(1, 2)]
    assert conducted(folder, replace(of, repeats=4), monkeypatch) == [(3, n) for n in (1, 2, 4)]
    result = command.collect_result(folder, of)
    assert result.serial.mean == pytest.approx(SERIAL)


def test_a_size_that_fails_is_left_at_that(tmp_path, monkeypatch):
    of, folder = study(), StudyFolder(tmp_path)
    calls = conducted(folder, of, monkeypatch, failing=(2,))
    assert calls == [(0, 1), (0, 2), (0, 4), (1, 1), (1, 4), (2, 1), (2, 4)]
    result = command.collect_result(folder, of)
    assert [row["reason"] for row in result.of("gap")] == ["no such thing on this size"]
    again = conducted(folder, of, monkeypatch)  # what was wrong may be mended by then
    assert again == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("step_s, steps", [(1e-3, 2000), (1e-5, 3000), (1.0, 20)])
def test_a_pilot_tells_how_many_steps_to_time(step_s, steps, tmp_path, monkeypatch):
    calls = []
    times = lambda ranks, repeat: Times(step_s / ranks, step_s / ranks / 2)  # noqa: E731
    monkeypatch.setattr(local_runner, "run", runner(times, calls))
    of = study(steps=None)
    with LiveView(of) as view:
        result = trial_runner.run_pilots(StudyFolder(tmp_path), of, SUBJECT, view)
    assert (result.steps, calls) == (steps, [("pilot", 1), ("pilot", 4)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("watched", [False, True])
def test_a_trial_that_takes_too_long_is_ended(watched, tmp_path, monkeypatch):
    monkeypatch.setattr(local_runner, "POLL_S", 0.05)
    looks = []
    look = partial(looks.append, 1) if watched else None
    assert local_runner.run(["sleep", "60"], tmp_path / "log", None, 0.2, look) == 1
    assert "ended after 0.2 s" in (tmp_path / "log").read_text()
    assert bool(looks) is watched
    assert local_runner.run(["false"], tmp_path / "log", None, 60.0, look) == 1
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_the_report_in_a_browser(tmp_path):
    command.write(tmp_path, with_gaps(), ["as it is"], with_plots=True)
    shot, written = tmp_path / "shot.png", tmp_path / "report.html"
    screen = ("--window-size=1200,2400", f"--screenshot={shot}")
    assert browse(tmp_path, *screen, written.as_uri())[1] == []
    picture = image.imread(shot)
    # A page without its images would have text, but none of the colours of the plots.
    drawn = (plots.BLUE, plots.ORANGE, plots.VERMILION)
    assert [color for color in drawn if painted(picture, color) < 50] == []
    looked = tmp_path / "looked.html"
    looked.write_text(re.sub("<meta http-equiv=[^>]*>", LOOK, written.read_text()))
    dom, message = browse(tmp_path, "--dump-dom", looked.as_uri())
    widths = [
        int(width) for width in re.findall(r"\.=(\d+)", dom)
    ]  # behind what each picture shows
    assert (len(widths), min(widths) > 1000, message) == (2, True, [])


def no_time(result, **_):
    """Stand for what draws plots: that is tested above."""
    return {"scaling.png": b"", "time.png": b""}


def called(monkeypatch, out, *words, failing=(), times=amdahl, draw=no_time):
    """Return the exit code of `hpctrain scale` with trials that take no time, and their calls."""
    calls = []
    monkeypatch.setattr(plots, "plots", draw)
    monkeypatch.setattr(
        local_runner, "must_work", lambda *_: MpiInstallation("MPICH", "5", "lib", "mpiexec")
    )
    monkeypatch.setattr(local_runner, "run", runner(times, calls, failing))
    line = ["digits", "--ranks", "1,2", "--out", str(out), *words]
    return scale.main(line, standalone_mode=False), [
        single for single in calls if single[0] != "link"
    ]


def test_a_collector_that_was_stopped_is_called_again(tmp_path, monkeypatch):
    def stop(result, **_):
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Abort)):
        called(monkeypatch, tmp_path / "s", draw=stop)
    assert not list((tmp_path / "s").glob("scaling*"))
    assert called(monkeypatch, tmp_path / "s") == (0, [])  # nothing is left to run
    assert (tmp_path / "s" / "report.html").exists()
    (tmp_path / "s" / "scaling.png").unlink()
    assert called(monkeypatch, tmp_path / "s") == (0, [])
    assert (tmp_path / "s" / "scaling.png").exists()


def test_what_there_is_is_drawn_where_trials_are_stopped(tmp_path, monkeypatch, caplog):
    def amdahl_or_stop(ranks, repeat):
        if (ranks, repeat) == (2, 1):
            raise KeyboardInterrupt
        return amdahl(ranks, repeat)

    with pytest.raises((KeyboardInterrupt, Abort)):
        called(monkeypatch, tmp_path / "s", times=amdahl_or_stop)
    assert f"results so far are in {tmp_path / 's'}" in caplog.text
    rows = list(csv.DictReader((tmp_path / "s/scaling.csv").read_text().splitlines()))
    assert [(row["kind"], row["repeats"]) for row in rows[:2]] == [
        ("measured", "2"),
        ("measured", "1"),
    ]
    assert (tmp_path / "s/report.html").exists()
    assert called(monkeypatch, tmp_path / "s") == (0, [(1, 2), (2, 1), (2, 2)])


def test_the_exit_code_tells_of_gaps(tmp_path, monkeypatch):
    code, calls = called(monkeypatch, tmp_path / "s", "--repeats", "1", failing=(2,))
    assert (code, calls) == (1, [("pilot", 1), ("pilot", 2), (0, 1), (0, 2)])
    assert called(monkeypatch, tmp_path / "s", "--repeats", "1") == (0, [(0, 2)])
    grown = called(monkeypatch, tmp_path / "s", "--repeats", "2")
    assert grown == (0, [(1, 1), (1, 2)])  # no pilot: a trial is as long as before
    with pytest.raises(UsageError, match="holds another study: mode was strong, now weak"):
        called(monkeypatch, tmp_path / "s", "--mode", "weak")
    with pytest.raises(UsageError, match=r"holds another study: tables\.run was .*'epochs': 30"):
        called(monkeypatch, tmp_path / "s", "--set", "run.epochs=2")


def test_who_calls_while_another_works_sees_how_things_stand(tmp_path, monkeypatch, capsys):
    assert called(monkeypatch, tmp_path / "s", "--repeats", "1")[0] == 0
    shutil.rmtree(StudyFolder(tmp_path / "s").trial(Size(2), 0))
    with (
        lock_folder(tmp_path / "s"),
        pytest.raises(UsageError, match="is being written by process"),
    ):
        called(monkeypatch, tmp_path / "s", "--repeats", "1")
    message = " ".join(capsys.readouterr().err.split())
    assert "│ 1 │ measured │ 1 of 1 │ - │ 12,800 │ 100.0% │" in message
    assert "│ 2 │ running │ 0 of 1 │" in message


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib.figure"])
def test_without_the_extra_all_but_pictures_is_there(missing, tmp_path, monkeypatch, caplog):
    for module in ("scaling.output.page", "scaling.output.plots", "report.page", "report.plots"):
        monkeypatch.delitem(sys.modules, f"hpctrain.tools.{module}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    assert called(monkeypatch, tmp_path / "s")[0] == 0
    assert "pip install 'hpctrain[report]'" in caplog.text
    written = {path.name for path in (tmp_path / "s").iterdir() if path.is_file()}
    assert written == {".lock", "study.json", "scaling.json", "scaling.csv"}


def noisy():
    """Return a study of which the second repeat did 100 times the samples/s of the first."""
    of = study((1, 2), repeats=2)
    return evaluate(of, trials(of, lambda n, i: Times(1e-2 / n / 100**i, 1e-3 / n / 100**i)))


def test_an_interval_beyond_its_mean_is_not_drawn_and_said():
    result = noisy()
    for row in result.of("measured"):
        assert row["samples_per_s_ci95"] > row["samples_per_s"]
        assert tables.with_interval(row, "samples_per_s", ",.0f").endswith(" ± ?")
        assert "repeats differ by more" in "; ".join(tables.remarks(row))
        values, half = row["samples_per_s"], plots._spread([row], "samples_per_s")
        assert [*half[0], *half[1]] == [values, values]
    steady = evaluate(study((1, 2)), trials(study((1, 2)), lambda n, i: amdahl(n, i))).rows[0]
    low, high = plots._spread([steady], "samples_per_s")
    assert low < steady["samples_per_s"] < high
    assert "± ?" not in "; ".join(
        [tables.with_interval(steady, "samples_per_s", "g"), *tables.remarks(steady)]
    )


@pytest.mark.parametrize(("times", "message"), [(0.44, True), (0.495, False), (0.6, False)])
def test_an_efficiency_above_the_ideal_gets_a_word(times, message):
    of = study((1, 2))
    result = evaluate(of, trials(of, lambda n, i: Times(1e-2 * (times if n == 2 else 1), 1e-3)))
    words = "; ".join(tables.remarks(result.rows[1]))
    assert ("above 100 %: noise" in words) == message


@pytest.mark.parametrize(("gbit", "message"), [(1.41, True), (1.01, False), (0.9, False)])
def test_a_wire_faster_than_its_link_gets_a_word(gbit, message):
    model = SimpleNamespace(beta_s=8e-9 / gbit)
    assert (
        "more than a link of 1gbit carries" in tables._faster_than_link(model, "1gbit")
    ) == message
    assert tables._faster_than_link(model, None) == ""  # on this machine no rate is known


def test_the_page_says_its_title_once():
    result = with_gaps()
    assert plots.scaling(result).get_suptitle() == plots.time(result).get_suptitle() != ""
    assert plots.plots(result, "", ("png",)).keys() == {"scaling.png", "time.png"}
    assert plots.scaling(result, "").get_suptitle() == plots.time(result, "").get_suptitle() == ""
    assert page(result, {}, []).count(tables.title(result.study)) == 2  # of the window, of the page
