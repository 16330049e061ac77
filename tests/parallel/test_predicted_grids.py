"""`hpctrain pipeline predict`, and the grid in a study's table."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hpctrain.commands.pipeline import pipeline
from hpctrain.core.errors import UsageError
from hpctrain.parallel.pipeline.layer_times import LayerSeconds
from hpctrain.parallel.timing.predict import Grid
from hpctrain.tools.bench.prediction import grids
from hpctrain.tools.bench.prediction.predict import make_cluster, make_wire

FAST = make_cluster(make_wire(1e15, 0.0), make_wire(1e15, 0.0), 1e18, 1, 1)
LAYERS = grids.LayeredModel([LayerSeconds(1.0, 1.0, 1.0)] * 8, [0] * 7, [0] * 8, 1)
THIRTEEN = "--model 13e9,40,5120,2048 --flops 400e12"

#: schedule, pipe, micro-batches -> seconds of a step of eight layers of 3 s without wires
STEPS = {
    "one rank": ("1f1b", 1, 4, 4 * 24),
    "1f1b": ("1f1b", 4, 8, (8 + 3) * 6),
    "zb-h1": ("zb-h1", 4, 8, 8 * 6 + 3 * 2),
    "gpipe": ("gpipe", 2, 4, (4 + 1) * 12),
}


@pytest.mark.parametrize("case", STEPS)
def test_steps_without_wires_are_those_of_the_clock(case):
    name, pipe, count, seconds = STEPS[case]
    step = grids.predict_grid(LAYERS, name, pipe, count, Grid(FAST, 3))
    assert step.step == pytest.approx(seconds, rel=1e-6) and step.ranks == 3 * pipe
    assert step.efficiency == pytest.approx(count * 24 / pipe / seconds, rel=1e-6)


def test_more_samples_take_longer_in_proportion():
    step = grids.predict_grid(LAYERS.scaled(2.0), "1f1b", 4, 8, Grid(FAST, 1))
    assert step.step == pytest.approx(2 * 66)


def predict(words: str):
    return CliRunner().invoke(pipeline, ["predict", *words.split()])


@pytest.mark.timeout(60)
def test_six_predictions_up_to_16384_ranks_take_less_than_a_minute(tmp_path):
    out = tmp_path / "rows.json"
    words = f"{THIRTEEN} --ranks 4096,16384 --pipe 4,8,16 --ranks-per-node 8 --cards 8"
    plot = tmp_path / "grids.png"
    result = predict(f"{words} --schedule zb-h1 --batch 64 --json {out} --plot {plot}")
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["ranks"], row["data"], row["pipe"]) for row in rows] == [
        (ranks, ranks // pipe, pipe) for ranks in (4096, 16384) for pipe in (4, 8, 16)
    ]
    assert all(0 < row["efficiency"] < 1 and row["step_s"] > row["pipeline_s"] for row in rows)
    assert "4,096 x 4" in result.output and plot.stat().st_size > 10_000


#: words -> message
REFUSED = {
    "no model": ("--ranks 4 --pipe 2", "expected one of RECIPE and --model"),
    "half a model": ("--model 13e9,40 --flops 1e12 --ranks 4 --pipe 2", "expected parameters"),
    "no flops": ("--model 1e9,4,8,8 --ranks 4 --pipe 2", "--flops: expected"),
    "not divided": (f"{THIRTEEN} --ranks 3 --pipe 2", "start 2 or 4 ranks, or set pipe = 1 or 3"),
    "no samples": (f"{THIRTEEN} --ranks 64 --pipe 2 --mode strong --batch 8", "raise --batch"),
    "no batch": (f"{THIRTEEN} --ranks 4 --pipe 2 --batch 0", "--batch: expected 1 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    words, message = REFUSED[case]
    result = predict(words)
    assert isinstance(result.exception, UsageError) and message in str(result.exception)


def test_a_recipe_on_the_command_line():
    result = predict("digits --ranks 2,4 --pipe 1,2")
    assert result.exit_code == 0 and "2 x 2" in result.output
