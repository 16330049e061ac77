"""`hpctrain pipeline draw | check`: pictures, tables, verdicts, refusals."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import hpctrain.parallel.schedules
from hpctrain.commands.pipeline import pipeline
from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules import SCHEDULES, make
from hpctrain.parallel.timing import picture, summary
from hpctrain.parallel.timing.summary import summarize, time_uniform

UNIT = (1.0, 1.0, 1.0)


def run(words: str) -> Result:
    return CliRunner().invoke(pipeline, words.split(), catch_exceptions=True)


def lines(words: str) -> list[str]:
    result = run(words)
    assert result.exception is None, result.output
    return result.output.splitlines()


def test_a_picture_has_a_row_per_rank_and_fits_a_terminal():
    output = lines("draw --schedule 1f1b --ranks 4 --micro-batches 8")
    assert output[2:6] == [
        "rank 0  0 1 2 3 . . . . . .B0-- 4B1-- 5B2-- 6B3-- 7B4-- .B5-- .B6-- .B7--",
        "rank 1  . 0 1 2 . . . .B0-- 3B1-- 4B2-- 5B3-- 6B4-- 7B5-- .B6-- .B7-- . .",
        "rank 2  . . 0 1 . .B0-- 2B1-- 3B2-- 4B3-- 5B4-- 6B5-- 7B6-- .B7-- . . . .",
        "rank 3  . . . 0B0-- 1B1-- 2B2-- 3B3-- 4B4-- 5B5-- 6B6-- 7B7-- . . . . . .",
    ]
    assert output[-1] == "step 33, bubble 27 %: take 16 micro-batches for 16 %, 32 for 9 %"


def test_a_long_picture_is_wrapped_and_a_longer_one_names_the_plot():
    wrapped = lines("draw --schedule zb-v --ranks 2 --micro-batches 16")
    rows = [line for line in wrapped if line.startswith("rank ")]
    assert len(rows) == 2 * 6 and max(map(len, rows)) <= 80
    assert "take --plot FILE.png." in "\n".join(
        lines("draw --schedule zb-v --ranks 2 --micro-batches 100")
    )


def test_actions_of_uneven_costs_are_cells_of_the_shortest():
    timeline = time_uniform(make("zb-h1", 2, 3), (1.0, 1.4, 0.5))
    assert picture.draw(timeline) == [
        "rank 0  0-- 1-- . . .I0----W0 2--I1--W1 .I2----W2",
        "rank 1  . . 0--I0---- 1--I1----W0 2--I2--W1W2 . .",
    ]
    assert picture.unit(timeline) == pytest.approx(0.5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_a_docstring_is_the_one_that_is_drawn(name):
    module = import_module(f"hpctrain.parallel.schedules.{SCHEDULES[name]}")
    micro_batches = 4 if "four micro-batches" in (module.__doc__ or "") else 8
    timeline = time_uniform(make(name, 4, micro_batches), UNIT)
    for row in filter(None, picture.draw(timeline, 92)):
        assert f"    {row}\n" in (module.__doc__ or "")


def test_check_shows_all_schedules():
    output = "\n".join(lines("check --ranks 4 --micro-batches 8"))
    for row in (
        "│ gpipe         │      4 │   33 │ 27.3 % │           8 │       16 │ 16",
        "│ interleaved   │      8 │ 28.5 │ 15.8 % │         5.5 │       32 │ 32",
        "│ zb-v          │      8 │ 25.5 │  5.9 % │           4 │       32 │ 32 MiB │ ok",
    ):
        assert row in output


def test_check_of_all_leaves_out_what_does_not_fit():
    output = "\n".join(lines("check --ranks 4 --micro-batches 3"))
    assert "left out: interleaved: expected a multiple of 4 ranks" in output
    assert (
        "50.0 % │           3 │        6 │  6 MiB │ since micro-batches are fewer than ranks: "
        in output
    )


def test_chunks_apply_to_the_schedules_that_take_any_number():
    rows = json.loads(run("check --ranks 4 --micro-batches 8 --chunks 4 --json").output)["rows"]
    stages = {row["schedule"]: row["stages_per_rank"] for row in rows}
    assert (stages["interleaved"], stages["breadth-first"]) == (4, 4)
    assert (stages["1f1b"], stages["zb-v"]) == (1, 2)


def test_stages_stand_for_ranks():
    words = "check --micro-batches 8 --json"
    by_ranks, by_stages = (
        run(f"{words} --schedule zb-v {sizes}").output for sizes in ("--ranks 4", "--stages 8")
    )
    assert by_ranks == by_stages


def test_json_of_check_has_numbers_per_rank():
    (row,) = json.loads(
        run("check --schedule 1f1b --ranks 3 --micro-batches 6 --activation 10B --json").output
    )["rows"]
    assert row["peak_activations"] == [3, 2, 1]
    assert (row["messages"], row["bytes"]) == ([6, 12, 6], [60, 120, 60])
    assert row["step"] == 24


def test_json_of_draw_has_each_action():
    content = json.loads(
        run("draw --schedule gpipe --ranks 2 --micro-batches 2 --costs 1,2,3 --json").output
    )
    assert content["actions"][1][2] == {"op": "B", "stage": 1, "micro": 0, "start": 3, "end": 8}
    assert [len(actions) for actions in content["actions"]] == [4, 4]


def test_a_verdict_doubles_until_the_bubble_is_small():
    verdicts = {m: summarize(make("1f1b", 8, m), UNIT, 0).verdict for m in (8, 64)}
    assert verdicts == {
        8: "bubble 47 %: take 16 micro-batches for 30 %, 64 for 10 %",
        64: "bubble 10 %: ok",
    }


def test_a_verdict_ends_where_the_clock_would_take_long(monkeypatch):
    monkeypatch.setattr(summary, "MAX_PAIRS", 10)
    assert summarize(make("1f1b", 4, 8), UNIT, 0).verdict == "bubble 27 %"


@pytest.mark.sample(1)
@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_plots(name, suffix, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{suffix}"
    lines(f"draw --schedule {name} --ranks 4 --micro-batches 8 --plot {file}")
    assert file.stat().st_size > 10_000


#: command line: what the refusal says
REFUSALS = {
    "check --micro-batches 8": "expected one of --ranks and --stages, such as --ranks 4",
    "check --micro-batches 8 --ranks 4 --stages 4": "expected one of --ranks and --stages",
    "check --micro-batches 8 --ranks 0": "expected 1 rank or more, seen 0",
    "check --micro-batches 0 --ranks 4": "expected 1 micro-batch or more, seen 0",
    "check --micro-batches 8 --stages 7 --schedule zb-v": "seen 7; take 8",
    "check --micro-batches 8 --ranks 4 --schedule zb-h2": "did you mean 'zb-h1'?",
    "check --micro-batches 6 --ranks 4 --schedule interleaved": "seen 6; take 4 or 8",
    "check --micro-batches 8 --ranks 4 --schedule 1f1b --chunks 2": "expected 1 stage per rank",
    "check --micro-batches 8 --ranks 4 --costs 1,1": "expected three positive numbers",
    "check --micro-batches 8 --ranks 4 --costs 1,0,1": "such as 1,1,1, seen '1,0,1'",
    "check --micro-batches 8 --ranks 4 --costs 1,nan,1": "expected three positive numbers",
    "check --micro-batches 8 --ranks 4 --activation 5Mob": "--activation: expected sizes such as",
    "check --micro-batches 100000 --ranks 4": "expected at most 256 ranks and 100,000 pairs",
    "check --micro-batches 1 --ranks 100000": "seen 100,000 ranks and 1 micro-batches",
    "draw --micro-batches 8 --ranks 4": "--schedule is missing; choose one of: gpipe, 1f1b",
    "draw --micro-batches 8 --ranks 4 --schedule 1f1b --plot x.unknown": "--plot x.unknown",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_it_refuses(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(words)
    assert isinstance(result.exception, UsageError) and REFUSALS[words] in str(result.exception)


def test_plots_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "hpctrain.tools.show.plots", None)
    result = run("draw --schedule 1f1b --ranks 2 --micro-batches 2 --plot x.png")
    assert "pip install 'hpctrain[report]'" in str(result.exception)


def test_every_schedule_has_a_file_of_its_own():
    folder = Path(hpctrain.parallel.schedules.__file__).parent
    shared = {"__init__", "actions", "check", "forward", "messages", "placement", "vee"}
    assert {*SCHEDULES.values()} | shared == {file.stem for file in folder.glob("*.py")}
