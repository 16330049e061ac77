"""Losses of ranks on the axes of plots: a line, a mark at its top, and a label.

Losses near each other share a label. Of many losses the marks alone are drawn, and their sum is
written below the axis. Marks and words can be read in grey, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from hpctrain.core.names import counted
from hpctrain.core.palette import BLACK, VERMILION
from hpctrain.tools.report.record import Loss

NEAR = 0.04  #: of the axis: the width of a label
MAX_RANKS = 3  #: more are not named in a label
MAX_LABELS = 10  #: more would hide the curves


def mark_losses(axes: Axes, losses: Sequence[Loss], x: Sequence[float]) -> None:
    """Mark `losses` at `x`; call it once the limits of the axis are set."""
    if not losses:
        return
    above = axes.get_xaxis_transform()  # x in data, y from 0 to 1
    axes.plot(x, [1.0] * len(x), "v", transform=above, color=VERMILION, markeredgecolor=BLACK,
              markersize=7 if len(x) <= MAX_LABELS else 5, clip_on=False, zorder=5)  # fmt: skip
    if len(x) > MAX_LABELS:
        return
    halo = [withStroke(linewidth=2.5, foreground="white")]  # visible on bars of any colour
    axes.vlines(x, 0, 1, transform=above, color=BLACK, linestyle="-.", linewidth=1,
                path_effects=halo)  # fmt: skip
    low, high = axes.get_xlim()
    for first, group in group_near(x, NEAR * (high - low)):
        # To the right of the line, where training went on; near the right end to its left.
        is_right = first < low + 0.95 * (high - low)
        axes.annotate(
            describe([losses[i] for i in group]), (first, 0.96), (3 if is_right else -3, 0),
            xycoords=above, textcoords="offset points", rotation=90, va="top",
            ha="left" if is_right else "right", fontsize=7, zorder=6,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip


def describe_marks(losses: Sequence[Loss]) -> str:
    """Return the meaning of the marks, for below the axis; of many losses their sum."""
    return f"▼: {describe(losses)}" if len(losses) > MAX_LABELS else "▼: ranks lost"


def group_near(x: Sequence[float], width: float) -> list[tuple[float, list[int]]]:
    """Return groups of values of ascending `x` within a `width`: the first, and all indexes."""
    groups: list[tuple[float, list[int]]] = []
    for i, value in enumerate(x):
        if groups and value - groups[-1][0] < width:
            groups[-1][1].append(i)
        else:
            groups.append((value, [i]))
    return groups


def describe(losses: Sequence[Loss]) -> str:
    """Return the label of some losses: the ranks, or their number, and the seconds in all."""
    ranks = [rank for loss in losses for rank in loss.ranks]
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    text = names if len(ranks) <= MAX_RANKS else f"{counted(len(ranks), 'rank')} lost"
    times = [loss.lost_s for loss in losses if loss.lost_s is not None]
    return text + (f": {sum(times):.2g} s" if times else "")
