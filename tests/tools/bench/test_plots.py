"""Plots of benchmarks: numbers with one unit, and no overlapping labels."""

from __future__ import annotations

from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hpctrain.tools.bench import plot
from hpctrain.tools.bench.units import size_text
from hpctrain.tuning.model.message_schedules import SCHEDULES

SIZES = [4 << i for i in range(0, 25)]


@pytest.fixture
def drawn(monkeypatch):
    """Return the figures that are saved, with every label in its place."""
    figures = []

    def save(figure, *_, **__):
        FigureCanvasAgg(figure).draw()
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


def labels(axis):
    """Return the labels of all ticks of an axis that lie within it, minor ones too."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [t.label1 for t in ticks if low <= t.get_loc() <= high and t.label1.get_text()]


def overlapping(axis):
    boxes = [label.get_window_extent() for label in labels(axis)]
    return [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def collective(seconds):
    """Return rows of one algorithm, which takes so long for the first size, and for the last."""
    first, last = seconds
    times = [first * (last / first) ** (i / (len(SIZES) - 1)) for i in range(len(SIZES))]
    return [
        {"algorithm": "ring", "bytes": size, "median_s": s, "p5_s": s, "p95_s": s, "busbw": 1.0}
        for size, s in zip(SIZES, times, strict=True)
    ]


#: seconds of the shortest and the longest -> what the axis of times says
SPANS = {(1e-6, 0.1): {"1 µs", "100 µs", "10 ms", "100 ms"}, (2.1e-3, 9e-3): {"5 ms"}}


@pytest.mark.parametrize("span", SPANS)
def test_times_of_collectives_have_one_unit(drawn, tmp_path, span):
    plot.draw_size_plot(collective(span), "a title", tmp_path / "x.png")
    time, speed = drawn[0].axes
    message = {label.get_text() for label in labels(time.yaxis)}
    assert SPANS[span] <= message
    assert all(text.endswith("s") and "10^" not in text for text in message)
    assert "[us]" not in time.get_ylabel()
    for axes in (time, speed):
        assert overlapping(axes.xaxis) == overlapping(axes.yaxis) == []


def test_times_of_predictions_have_one_unit(drawn, tmp_path):
    rows = [
        {"operation": "allreduce", "kind": "predicted", "algorithm": name, "ranks": ranks,
         "bytes": size, "predicted_s": 2e-3 * (1 + i % 5)}
        for i, name in enumerate(SCHEDULES) for ranks in (2, 4) for size in SIZES
    ]  # fmt: skip
    plot.draw_prediction(rows, "a title", tmp_path / "x.png")
    for axes in drawn[0].axes:
        message = [label.get_text() for label in labels(axes.yaxis)]
        assert message and all(text.endswith(" ms") for text in message)
        assert overlapping(axes.xaxis) == overlapping(axes.yaxis) == []
    assert size_text(SIZES[-1]) == "64 MiB"
