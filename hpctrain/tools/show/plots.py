"""The style of plots: how a figure is titled, explained and written; colours: core/palette.py.

Timelines of pipelines are plots with a row per rank, a bar per action.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which would look for a screen
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from hpctrain.core.errors import UsageError
from hpctrain.core.palette import COLORS, GREY, plain
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.timing.clock import Timeline

SECONDS_FORMAT = EngFormatter(unit="s")  #: 100 us, 1 ms
#: operation: colour, and what the legend says; dark, medium and pale also in grey
OPS = {
    "F": (COLORS[5], "forward"),
    "B": (COLORS[0], "backward"),
    "I": (COLORS[0], "gradient of the input"),
    "W": (GREY, "gradient of the parameters"),
}
HATCHES = ("", "//", "..", "\\\\", "xx", "oo")  #: of a rank's stages
MIN_LABELLED = 0.006  #: of the axis: a number of a micro-batch needs as much


def explain(figure: Figure, axes: Axes, columns: int, **style: Any) -> None:
    """Put the legend of `axes` below a figure."""
    handles_and_labels = axes.get_legend_handles_labels()
    figure.legend(*handles_and_labels, loc="outside lower center", ncols=columns, **style)


def save(figure: Figure, title: str, path: Path) -> None:
    """Write a figure to `path`, PNG or SVG by its suffix."""
    figure.suptitle(plain(title))
    figure.savefig(path, dpi=130)


def image(figure: Figure, kind: str = "png") -> bytes:
    """Return the figure as PNG or SVG; an SVG has no date, so that equal plots are equal files."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def draw_timeline(timeline: Timeline, title: str, path: Path) -> None:
    """Write the plot of `timeline` to `path`, PNG or SVG by its suffix."""
    figure = plot_timelines({title: timeline}, "time")
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None


def plot_timelines(
    timelines: Mapping[str, Timeline], time_label: str, rank_labels: Sequence[str] = ()
) -> Figure:
    """Plot the timelines of a schedule, by title, below each other on one time axis."""
    schedule = next(iter(timelines.values())).schedule
    labels = rank_labels or [f"rank {rank}" for rank in range(schedule.ranks)]
    height = 1.3 + len(timelines) * (0.3 + 0.4 * schedule.ranks)
    figure = Figure((12, height), layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    panels[0].set_xlim(0, max(timeline.makespan for timeline in timelines.values()))
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        for rank in range(schedule.ranks):
            _draw_rank(axes, timeline, rank)
        axes.set_ylim(schedule.ranks - 0.5, -0.5)
        axes.set_yticks(range(schedule.ranks), labels)
        axes.set_title(plain(title))
    panels[-1].set_xlabel(time_label)
    figure.legend(handles=_legend(schedule), loc="outside lower center", ncols=5, fontsize="small")
    return figure


def _legend(schedule: PipelineSchedule) -> list[Patch]:
    ops = {action.op for actions in schedule.actions for action in actions}
    patches = [Patch(facecolor=color, label=text) for op, (color, text) in OPS.items() if op in ops]
    if schedule.stages_per_rank > 1:
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": "black"}
        patches += [
            Patch(**style, hatch=_hatch(i), label=f"stage {i + 1} of a rank")
            for i in range(schedule.stages_per_rank)
        ]
    return patches


def _draw_rank(axes: Axes, timeline: Timeline, rank: int) -> None:
    schedule = timeline.schedule
    stages = schedule.stages_of(rank)
    for action, start, end in zip(
        schedule.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        axes.barh(
            rank,
            end - start,
            left=start,
            height=0.9,
            color=OPS[action.op][0],
            edgecolor="white",
            linewidth=0.5,
            hatch=_hatch(stages.index(action.stage)),
        )
        if end - start > MIN_LABELLED * axes.get_xlim()[1]:
            color = "white" if action.op in "BI" else "black"
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
            axes.text((start + end) / 2, rank, str(action.micro), **style)


def _hatch(index: int) -> str:
    return HATCHES[index % len(HATCHES)]
