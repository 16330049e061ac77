"""Reports of runs that are done, failed or still running; the page in a real browser."""

from __future__ import annotations

import base64
import json
import re
import sys
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
from browser import BROWSER, LOOK, browse, painted
from matplotlib import image
from ranks import run_on

from hpctrain.commands.runs import report
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.optim import CosineOptions
from hpctrain.optim.optimizer import rate_curve
from hpctrain.tools.report import many_ranks, page, plots, record
from hpctrain.training import recipe, runs

NAME = "<script>alert('$x_1$ & more')</script>"
PLOTS = {"loss.png", "rate.png", "time.png", "ranks.png"}


def row(step, since=0, **rest):
    """Return a row of an interval of 10 steps: 1 s, of which compute is 0.5 and wait 0.25."""
    intervals = (step - since) // 10
    return {
        "step": step, "steps": 10, "since_step": since, "train_loss": 1 / step,
        "train_accuracy": 0.5, "test_loss": None, "test_accuracy": None, "rate": 0.1,
        "wall_s": 1.0 * intervals, "compute_s": 0.5 * intervals, "wait_s": 0.25 * intervals,
        "wire_s": 0.4 * intervals,
        "ranks": {"compute_s": [0.5 * intervals, 0.3 * intervals],
                  "wait_s": [0.25 * intervals, 0.6 * intervals],
                  "wire_s": [0.4 * intervals] * 2,
                  "data_wait_s": [0.05 * intervals, 0.1 * intervals]},
        **rest,
    }  # fmt: skip


ROWS = [row(10), row(20, test_loss=0.3, test_accuracy=0.9), row(30)]
COMPLETED = {"status": "done", "exit_code": 0, "recipe": NAME, "reason": None, "test_accuracy": 0.9,
        "hosts": ["a", "b"], "staleness_mean": None, "versions": {"numpy": "9.8.7"}}  # fmt: skip
FAILED = {"status": "failed", "exit_code": 1, "reason": "rank 1: <b>lost</b>", "recipe": NAME}
RECIPE = f'[run]\nname = "{NAME}"\n'
STALE = {"staleness_histogram": {"0": 1, "3": 4, "200": 1}}
LOSSES = {**COMPLETED, "since_step": 0, "lost_s": 0.25, "ettr": 0.9875, "spares_used": 1,
          "recoveries": [{"step": 12, "wall_s": 1.25, "ranks": [2], "hosts": ["node-b"],
                          "spares": [4], "steps_redone": 0, "lost_s": 0.25}]}  # fmt: skip
#: rows, summary, recipe, last line of metrics.jsonl, plots, words on the page
RUNS = {
    "done": (ROWS, COMPLETED, RECIPE, "", PLOTS, ["done", "0.9000", "9.8.7", "a, b", "–", NAME]),
    "one row": (ROWS[:1], COMPLETED, RECIPE, "", PLOTS, ["done"]),
    "stopped": (ROWS, {**COMPLETED, "status": "stopped"}, RECIPE, "", PLOTS, ["stopped"]),
    "failed without rows": (
        [], FAILED, RECIPE, "", set(), ["failed", "rank 1: <b>lost</b>", "no row of metrics"]
    ),
    "torn last line": (ROWS, COMPLETED, RECIPE, '{"step": 4', PLOTS, ["done"]),
    "no summary": (ROWS, None, RECIPE, "", PLOTS, ["no summary: still running, or killed"]),
    "from Python": (ROWS, COMPLETED, None, "", PLOTS, ["started from Python"]),
    "rate unknown": ([row(10, rate=None)], COMPLETED, RECIPE, "", PLOTS - {"rate.png"}, ["done"]),
    "ranks unknown": ([row(10, ranks=None)], COMPLETED, RECIPE, "", PLOTS - {"ranks.png"},
                      ["done"]),
    "stale": ([row(10, **STALE), row(20, **STALE)], {**COMPLETED, **STALE}, RECIPE, "",
              PLOTS | {"staleness.png"}, ["0: 1, 3: 4, 200: 1"]),
    "never stale": ([row(10, staleness_histogram=None)], COMPLETED, RECIPE, "", PLOTS, ["done"]),
    "with losses": ([row(10), row(20, lost_ranks=[2])], LOSSES, RECIPE, "", PLOTS,
                    ["Ranks lost", "node-b", "0.250 s", "0.9875", "time without progress"]),
    "losses without a summary": ([row(10, lost_ranks=[2, 0])], None, RECIPE, "", PLOTS,
                                 ["Ranks lost", "2, 0"]),
    "no losses": (ROWS, {**LOSSES, "recoveries": [], "lost_s": 0.0, "ettr": 1.0}, RECIPE, "",
                  PLOTS, ["done"]),
    "metrics": ([row(10, test_auc=0.7, test_confusion=[[3, 1], [0, 2]], test_own=7.0),
                 row(20, test_auc=None), row(30, test_auc=0.8, test_top_2=0.9)],
                {**COMPLETED, "test_auc": 0.8, "test_confusion": [[3, 1], [0, 2]]}, RECIPE, "",
                PLOTS | {"metrics.png", "confusion.png"}, ["test AUC", "0.8000"]),
    "nothing but a recipe": ([], None, RECIPE, "", set(), ["no summary", "no row of metrics"]),
}  # fmt: skip


def write(folder, rows, summary, recipe, torn=""):
    folder.mkdir()
    for item in rows:
        run_folder.append_row(folder, item)
    if torn:
        with open(folder / run_folder.METRICS, "a") as file:
            file.write(torn)
    if summary is not None:
        run_folder.write_summary(folder, summary)
    if recipe is not None:
        run_folder.write_recipe(folder, recipe)
    return folder


DRAWN: dict[tuple, dict[str, bytes]] = {}


def drawn(read, draw=plots.plots):
    """Return the plots of a run; those of equal rows, under an equal title, are drawn once."""
    key = json.dumps(read.rows), read.name
    if key not in DRAWN:
        DRAWN[key] = draw(read)
    return DRAWN[key]


class Page(HTMLParser):
    """The text of a page, its images, its tags that open and were never closed, its links."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.images, self.open, self.links, self.tags = "", {}, [], [], set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        about = dict(attrs)
        self.tags.add(tag)
        if tag == "img":
            self.images[about["alt"]] = about["src"]
        if tag not in ("img", "meta"):
            self.open.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", RUNS)
def test_report(kind, tmp_path, monkeypatch):
    rows, summary, recipe, torn, expected, words = RUNS[kind]
    monkeypatch.setattr(page, "plots", drawn)
    run = write(tmp_path / "run", rows, summary, recipe, torn)
    written = page.write(run, tmp_path / "new" / "out")
    observed = Page(written.read_text())
    assert (observed.open, observed.links) == ([], [])
    assert not observed.tags & {"script", "b", "link", "iframe"}  # names and reasons are text
    assert [word for word in words if word not in observed.text] == []
    assert {file.name for file in written.parent.iterdir()} == {page.PAGE, *expected}
    assert observed.images.keys() == expected
    for name, source in observed.images.items():
        png = base64.b64decode(source.removeprefix("data:image/png;base64,"))
        assert png == (written.parent / name).read_bytes()
        assert painted(image.imread(BytesIO(png)), plots.BLUE) > 10


#: histograms as written in rows -> gradients by staleness
HISTOGRAMS = [
    ([None, {"0": 2}, {"0": 3, "2": 1}], [[0, 0, 0], [2, 0, 0], [3, 0, 1]]),
    ([{"10": 1, "9": 2}], [[0] * 9 + [2, 1]]),
    ([None, None], [[], []]),
    ([], np.zeros((0, 0))),
]


@pytest.mark.parametrize(("written", "expected"), HISTOGRAMS)
def test_staleness_by_row(written, expected):
    result = record.RunRecord("a", [{"staleness_histogram": item} for item in written]).staleness()
    np.testing.assert_array_equal(result, expected)


#: rows as written; then steps kept, seconds of each interval on the wall, steps of a resumption
PARTS = {
    "one part": (ROWS, [10, 20, 30], [1, 1, 1], []),
    "resumed": ([row(10), row(20), row(30, 20), row(40, 20)], [10, 20, 30, 40], [1] * 4, [20]),
    "resumed, redone": (
        [row(10), row(20), row(30), row(20, 10), row(30, 10)], [10, 20, 30], [1, 1, 1], [10]
    ),
    "resumed, slower": ([row(10), row(20, 10, wall_s=7.0)], [10, 20], [1, 7], [10]),
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTS)
def test_clocks_of_resumed_parts_add_up(kind, tmp_path):
    rows, steps, seconds, resumed = PARTS[kind]
    read = record.read(write(tmp_path / "run", rows, None, None))
    assert read.column("step").tolist() == steps
    assert read.seconds_per_row("wall_s").tolist() == seconds
    assert read.resumed() == resumed


def test_times_of_ranks_are_those_since_the_last_resumption(tmp_path):
    read = record.read(write(tmp_path / "run", [row(10), row(20, 10), row(30, 10)], None, None))
    result = {name: seconds.tolist() for name, seconds in read.by_rank().items()}
    assert result == {
        "wall_s": [2, 2], "compute_s": [1, 0.6], "wait_s": [0.5, 1.2], "wire_s": [0.8, 0.8],
        "data_wait_s": [0.1, 0.2],
    }  # fmt: skip


@pytest.mark.full
def test_a_thousand_rows_of_many_ranks(tmp_path):
    run = write(tmp_path / "run", [], COMPLETED, RECIPE)
    ranks = {f"{name}_s": [0.1] * 200 for name in ("compute", "wait", "wire")}
    rows = [*map(row, range(10, 10_000, 10)), row(10_000, ranks=ranks)]
    text = "".join(json.dumps(item) + "\n" for item in rows)
    (run / run_folder.METRICS).write_text(text)
    assert plots.plots(record.read(run)).keys() == PLOTS


def test_the_run_of_a_trainer_is_reported_by_the_command(hpctrain, tmp_path):
    spec = recipe.load("digits", ["run.epochs=2"])
    run_on("threads", 1, lambda world: runs.train(spec, world, tmp_path / "run", False))
    completed = hpctrain("report", "run")
    assert (completed.returncode, completed.stdout) == (0, "run/report.html\n"), completed.stderr
    assert Page((tmp_path / "run" / page.PAGE).read_text()).images.keys() == PLOTS


def test_a_folder_without_a_run_is_refused(hpctrain, tmp_path):
    for folder in ("nowhere", "."):
        completed = hpctrain("report", folder)
        assert completed.returncode == 2
        assert f"{folder} holds no run: expected recipe.toml" in completed.stderr
        assert not list(tmp_path.rglob("*.html"))


def test_what_cannot_be_read_or_written_is_refused(tmp_path):
    run = write(tmp_path / "run", ROWS, COMPLETED, RECIPE)
    with pytest.raises(UsageError, match="cannot be written"):
        page.write(run, run / run_folder.RECIPE / "below")
    (run / run_folder.SUMMARY).write_text('{"status": ')
    with pytest.raises(UsageError, match=r"summary.json, column 12: expected JSON"):
        page.write(run, tmp_path / "out")


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib.figure"])
def test_the_extra_is_named_where_it_is_missing(missing, tmp_path, monkeypatch):
    for module in ("page", "plots"):
        monkeypatch.delitem(sys.modules, f"hpctrain.tools.report.{module}")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[report\]'"):
        report.callback(tmp_path, None)


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_the_page_in_a_browser(tmp_path):
    run = write(tmp_path / "run", ROWS, COMPLETED, RECIPE)
    written, shot = page.write(run, run), tmp_path / "shot.png"
    screen = ("--window-size=1200,2400", f"--screenshot={shot}")
    assert browse(tmp_path, *screen, written.as_uri())[1] == []
    picture = image.imread(shot)
    assert picture.shape[:2] == (2400, 1200)
    # A page without its images would have text, but none of the colours of the plots.
    drawn = (plots.BLUE, plots.ORANGE, plots.VERMILION, plots.GREY)
    assert [color for color in drawn if painted(picture, color) < 50] == []
    looked = tmp_path / "looked.html"
    looked.write_text(re.sub("<meta http-equiv=[^>]*>", LOOK, written.read_text()))
    dom, message = browse(tmp_path, "--dump-dom", looked.as_uri())
    widths = dict(re.findall(r"(\w+\.png)=(\d+)", dom))
    assert (widths.keys(), message) == (PLOTS, [])
    assert min(map(int, widths.values())) > 300


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_the_console_is_heard(tmp_path):
    """Otherwise the page above could fail unheard."""
    (tmp_path / "page.html").write_text("<script>nowhere()</script>")
    assert len(browse(tmp_path, "--dump-dom", tmp_path / "page.html")[1]) == 1


def test_the_summary_is_told_in_words(tmp_path):
    spec = recipe.load("digits", ["run.epochs=1", "model.widths=[64,10]"])
    completed = run_on(
        "threads", 1, lambda world: runs.train(spec, world, tmp_path / "run", False)
    )[0]
    observed = Page(page.write(tmp_path / "run", tmp_path / "run").read_text()).text
    reported = observed.partition("Summary")[2].partition("Recipe")[0]
    assert all(
        page.words(key) in reported for key in completed if key not in ("versions", "rank_hosts")
    )
    assert "_" not in reported.replace(completed["recipe"], "")
    assert page.words("wall_s") == "wall time [s]" and page.words("steps") == "steps"


def many(size: int = 200, slow: int = 137, hosts: int = 25) -> tuple[dict, dict]:
    """Return a row and a summary of many ranks, one of which computes 1.6 times as long."""
    compute = np.random.default_rng(0).normal(1.0, 0.03, size)
    compute[slow] = 1.6
    times = {
        "compute_s": compute.tolist(),
        "wait_s": (2 - compute).tolist(),
        "wire_s": [0.1] * size,
    }
    names = [f"node{i:02d}" for i in range(1, hosts + 1)]
    summary = {"world_size": size, "hosts": names, "straggler_scores": compute.tolist(),
               "rank_hosts": [i * hosts // size for i in range(size)]}  # fmt: skip
    return row(10, wall_s=2.2, ranks=times), summary


def test_the_slow_one_of_many_ranks_is_named_with_its_host(tmp_path):
    rows, summary = many()
    figure = plots._plot_rank_times(record.RunRecord("a", [rows], summary))
    by_rank, by_host = figure.axes
    (text,) = (item.get_text() for item in by_rank.texts)
    assert text == "more compute than the median: rank 137 on node18 1.6x"
    assert not list(by_host.texts) and len(by_host.get_xticks()) == 25
    bars = [patch for axes in figure.axes for patch in axes.patches]
    assert len(bars) <= 10  # contours: 200 bars with edges are moire
    figure.canvas.draw()
    written = page.write(write(tmp_path / "a", [rows], {**COMPLETED, **summary}, None), tmp_path)
    text = Page(written.read_text()).text
    assert "node[01-25]" in text and "node07" not in text
    assert "median 1" in text and "the largest is number 137 of 0 to 199" in text


@pytest.mark.parametrize(
    "change", [{"rank_hosts": None}, {"rank_hosts": [99] * 200}, {"hosts": []}]
)
def test_many_ranks_on_unknown_hosts(change):
    rows, summary = many()
    figure = plots._plot_rank_times(record.RunRecord("a", [rows], {**summary, **change}))
    assert len(figure.axes) == 1 and "rank 137 1.6x" in figure.axes[0].texts[0].get_text()


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
def test_values_are_not_one_letter_wide_on_a_narrow_screen(tmp_path):
    rows, summary = many()
    written = page.write(write(tmp_path / "a", [rows], {**COMPLETED, **summary}, None), tmp_path)
    script = """<script>addEventListener("load", () => {
    document.title = Math.min(...[...document.querySelectorAll("td")].map(x => x.clientWidth))
    })</script>"""
    narrow = tmp_path / "narrow.html"
    narrow.write_text(
        re.sub("<meta http-equiv=[^>]*>", script, written.read_text()).replace(
            "<body>", "<body style='width: 390px'>"
        )
    )
    dom, _ = browse(tmp_path, "--window-size=420,900", "--dump-dom", narrow.as_uri())
    assert int(re.search(r"<title>(\d+)", dom)[1]) > 150


# ranks, workers in the summary (None: no summary) -> ticks, label of the axis
RANKS = {
    "one": (1, None, ["0"], "rank"),
    "workers": (3, 3, ["0", "1", "2"], "rank"),
    "a server": (3, 2, ["0", "1", "2\nserver"], "rank"),
    "colocated": (2, 2, ["0", "1"], "rank"),
    "many": (20, 17, None, "rank (servers: 17 to 19)"),
    "many workers": (20, None, None, "rank"),
}


@pytest.mark.parametrize("case", RANKS)
def test_ticks_are_ranks(case):
    size, workers, ticks, label = RANKS[case]
    times = {"compute_s": [0.5] * size, "wait_s": [0.1] * size, "wire_s": [0.2] * size}
    reported = {} if workers is None else {"world_size": size, "workers": workers}
    figure = plots._plot_rank_times(record.RunRecord("a", [row(10, ranks=times)], reported))
    (axes,) = figure.axes
    figure.canvas.draw()
    output = [tick.get_text() for tick in axes.get_xticklabels()]
    assert output == ticks or ticks is None
    assert all(float(place).is_integer() for place in axes.get_xticks())
    assert axes.get_xlabel() == label


def test_a_rank_alone_has_no_wire():
    times = {"compute_s": [0.5], "wait_s": [0.0], "wire_s": [0.0]}
    figure = plots._plot_rank_times(record.RunRecord("a", [row(10, ranks=times)]))
    assert plots.WIRE not in figure.axes[0].get_legend_handles_labels()[1]


def test_the_rate_is_a_curve_by_step():
    """Of cosine with a warm-up in 40 steps, and rows every 20: as the schedule has it."""
    rate = CosineOptions(warm_up_epochs=1).build(0.1, 10, 40)
    rates = [rate_curve(rate, first, first + 19, lambda step: step - 1) for first in (1, 21)]
    rows = [row(20 * n, rate=item[-1][1], rates=item) for n, item in enumerate(rates, 1)]
    (line,) = plots._plot_rate(record.RunRecord("a", rows)).axes[0].get_lines()
    steps, drawn = line.get_data()
    assert len(steps) == 34 and steps[0] == 1 and steps[-1] == 40
    np.testing.assert_allclose(drawn, [rate(int(step) - 1) for step in steps], rtol=1e-5)
    assert max(drawn) > 2 * drawn[0]  # it warms up inside the first row
    assert line.get_linestyle() == "-"


def test_the_curve_of_a_short_interval_has_each_step_once():
    assert rate_curve(lambda update: 0.5**update, 5, 7, lambda step: step - 1) == [
        [5, 0.0625], [6, 0.03125], [7, 0.015625]
    ]  # fmt: skip
    assert rate_curve(0.1, 1, 7, int) is None


def test_rates_known_at_the_ends_of_rows_alone_are_points():
    rows = [row(10, rate=0.1), row(20, rate=0.05)]
    (line,) = plots._plot_rate(record.RunRecord("a", rows)).axes[0].get_lines()
    assert (line.get_linestyle(), line.get_marker()) == ("None", "o")
    (line,) = plots._plot_rate(record.RunRecord("a", ROWS)).axes[0].get_lines()  # a constant rate
    assert line.get_linestyle() == "-"


PAST, NOW = row(10, lost_ranks=[1]), row(20, since=10, lost_ranks=[2])
ENTRY = {"step": 12, "wall_s": 0.25, "ranks": [2], "lost_s": 0.5}
#: rows, summary -> step, time in training, ranks, seconds of each loss
LOSS_TABLE = {
    "no rows": ([], {}, []),
    "of the last part by its summary": (
        [PAST, NOW], {"since_step": 10, "recoveries": [ENTRY]},
        [(10, 1.0, [1], None), (12, 1.25, [2], 0.5)],
    ),
    "no summary": ([PAST, NOW], {}, [(10, 1.0, [1], None), (20, 2.0, [2], None)]),
    "before the first row": ([], {"since_step": 0, "recoveries": [ENTRY]}, [(12, 0.25, [2], 0.5)]),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOSS_TABLE)
def test_losses_of_all_parts_are_on_the_time_axis(kind):
    rows, summary, expected = LOSS_TABLE[kind]
    losses = record.RunRecord("run", rows, summary).losses()
    assert [(x.step, x.at_s, x.ranks, x.lost_s) for x in losses] == expected


@pytest.mark.parametrize("count", [1, many_ranks.MAX_LABELS, many_ranks.MAX_LABELS + 1])
def test_each_plot_over_steps_or_time_marks_losses(count, tmp_path):
    steps = np.linspace(5, 25, count).astype(int).tolist()
    entries = [{**ENTRY, "step": step, "wall_s": step / 10} for step in steps]
    with_losses = {**LOSSES, "recoveries": entries}
    run = record.RunRecord("run", ROWS, with_losses)
    for draw, panels in (
        (plots._plot_losses, 4),
        (plots._plot_step_times, 1),
        (plots._plot_rate, 1),
    ):
        figure = draw(run)
        marks = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "v"]
        assert len(marks) == panels
        assert all(len(line.get_xdata()) == count for line in marks)
        labels = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert sum("rank" in text for text in labels) == panels * (
            count if count <= many_ranks.MAX_LABELS else 0
        )
        below = " ".join(axes.get_xlabel() for axes in figure.axes)
        assert ("ranks lost: 5.5 s" if count > many_ranks.MAX_LABELS else "▼: ranks lost") in below


def test_losses_near_each_other_share_a_label():
    groups = many_ranks.group_near([1.0, 1.5, 2.5, 9.0], 1.0)
    assert groups == [(1.0, [0, 1]), (2.5, [2]), (9.0, [3])]
    losses = [record.Loss(1, 1.0, [rank], lost_s=0.25) for rank in range(4)]
    assert many_ranks.describe(losses[:1]) == "rank 0: 0.25 s"
    assert many_ranks.describe(losses[:3]) == "ranks 0, 1, 2: 0.75 s"
    assert many_ranks.describe(losses) == "4 ranks lost: 1 s"
    assert many_ranks.describe([record.Loss(1, 1.0, [7])]) == "rank 7"
