"""Timelines as plots: a row per rank, a bar per action."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which needs a display
from matplotlib.patches import Patch

from hpctrain.core.errors import UsageError
from hpctrain.core.palette import COLORS
from hpctrain.parallel.timing.clock import Timeline

#: operation: colour, and what the legend says
OPS = {
    "F": (COLORS[5], "forward"),
    "B": (COLORS[4], "backward"),
    "I": (COLORS[4], "gradient of the input"),
    "W": (COLORS[2], "gradient of the parameters"),
}
HATCHES = ("", "//", "..", "\\\\", "xx", "oo")  #: of a rank's stages
MAX_LABELS = 400  #: more numbers of micro-batches would overlap


def draw_timeline(timeline: Timeline, title: str, path: Path) -> None:
    """Write the plot of `timeline` to `path`, PNG or SVG by its suffix."""
    schedule = timeline.schedule
    figure = Figure((12, 1.6 + 0.4 * schedule.ranks), layout="constrained")
    axes = figure.subplots()
    for rank in range(schedule.ranks):
        _draw_rank(axes, timeline, rank)
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(schedule.ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_xlabel("time")
    ops = {action.op for actions in schedule.actions for action in actions}
    patches = [Patch(facecolor=color, label=text) for op, (color, text) in OPS.items() if op in ops]
    if schedule.stages_per_rank > 1:
        patches += [
            Patch(
                facecolor="white",
                edgecolor="black",
                hatch=_hatch(i),
                label=f"stage {i + 1} of a rank",
            )
            for i in range(schedule.stages_per_rank)
        ]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None


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
        if sum(map(len, schedule.actions)) <= MAX_LABELS:
            axes.text(
                (start + end) / 2, rank, str(action.micro), ha="center", va="center", fontsize=7
            )


def _hatch(index: int) -> str:
    return HATCHES[index % len(HATCHES)]
