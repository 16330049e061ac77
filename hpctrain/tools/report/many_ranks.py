"""Ranks on plots: the times of many, and losses of some.

The times of many ranks are a contour over the ranks, slow ones named, hosts folded below. A loss of
ranks is a line, a mark at its top, and a label on the axes of a plot. Losses near each other share
a label. Of many losses the marks alone are drawn, and their sum is written below the axis. Marks
and words can be read in grey, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from hpctrain.core.names import counted
from hpctrain.core.palette import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION
from hpctrain.tools.report.record import Loss
from hpctrain.tools.show.plots import SECONDS_FORMAT, explain

SLOW = 1.2  #: times the median of compute, from which a rank is named
MAX_NAMED = 6  #: slow ranks that are named
MAX_HOSTS = 32  #: more names would run into each other
PARTS = {
    "compute": BLUE, "wait (exposed wire)": ORANGE, "wait for data": GREEN, "other": GREY,
}  # fmt: skip
NEAR = 0.04  #: of the axis: the width of a label
MAX_RANKS = 3  #: more are not named in a label
MAX_LABELS = 10  #: more would hide the curves


def plot_many_ranks(
    title: str, times: Mapping[str, np.ndarray], servers: Sequence[int], hosts: Sequence[str]
) -> Figure:
    """Return the figure: the times of each rank, and of each host if there are several.

    `times`: seconds by key, float64 (ranks,); `hosts` (ranks,), empty if unknown. The median of
    compute excludes the `servers`.
    """
    names = list(dict.fromkeys(hosts))
    has_hosts = 1 < len(names) < len(hosts)
    figure = Figure((10, 7 if has_hosts else 4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1 + has_hosts, 1))
    _draw_stack(panels[0], times)
    panels[0].set_title(title)
    workers = np.setdiff1d(np.arange(len(times["wall_s"])), servers)
    ratios = times["compute_s"] / max(float(np.median(times["compute_s"][workers])), 1e-12)
    labels = [f"rank {i}" for i in range(len(ratios))]
    if hosts:
        labels = [f"{label} on {host}" for label, host in zip(labels, hosts, strict=True)]
    _name_slow(panels[0], {i: ratios[i] for i in workers.tolist() if ratios[i] >= SLOW}, labels)
    text = f" (servers: {servers[0]} to {servers[-1]})" if servers else ""
    panels[0].set_xlabel(f"rank{text}")
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    if has_hosts:
        _draw_hosts(panels[1], times, np.array([names.index(host) for host in hosts]), names)
    for axes in panels:
        # Room for the names of slow ranks.
        axes.set(ylabel="time", ylim=(0, 1.25 * times["wall_s"].max()))
        axes.yaxis.set_major_formatter(SECONDS_FORMAT)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    explain(figure, panels[0], 4)
    return figure


def _draw_stack(axes: Axes, times: Mapping[str, np.ndarray]) -> None:
    """Draw disjoint parts as filled contours, without edges, which would hide narrow bars."""
    wall, compute, wait, data_wait = (
        times[f"{name}_s"] for name in ("wall", "compute", "wait", "data_wait")
    )
    edges = np.arange(len(wall) + 1) - 0.5
    floor = np.zeros_like(wall)
    heights = (compute, wait, data_wait, np.maximum(wall - compute - wait - data_wait, 0))
    for (label, color), height in zip(PARTS.items(), heights, strict=True):
        if not height.any():  # of data in memory
            continue
        axes.stairs(floor + height, edges, baseline=floor, fill=True, color=color, label=label)
        floor = floor + height
    if times["wire_s"].any():
        axes.stairs(times["wire_s"], edges, baseline=None, color=BLACK, label="wire")
    axes.set_xlim(edges[0], edges[-1])


def _draw_hosts(
    axes: Axes, times: Mapping[str, np.ndarray], host: np.ndarray, host_names: Sequence[str]
) -> None:
    """Draw the median of each part over the ranks of a host, and the range of their compute."""
    groups = [np.flatnonzero(host == i) for i in range(len(host_names))]
    medians = {
        key: np.array([np.median(values[group]) for group in groups])
        for key, values in times.items()
    }
    _draw_stack(axes, medians)
    compute = times["compute_s"]
    min_compute, max_compute = (
        np.array([pick(compute[group]) for group in groups]) for pick in (np.min, np.max)
    )
    x = np.arange(len(host_names))
    axes.vlines(x, min_compute, max_compute, color=BLACK, linewidth=2)
    axes.plot(x, max_compute, "_", x, min_compute, "_", color=BLACK)
    ratios = medians["compute_s"] / max(float(np.median(medians["compute_s"])), 1e-12)
    _name_slow(
        axes, {i: ratios[i] for i in range(len(host_names)) if ratios[i] >= SLOW}, host_names
    )
    if len(host_names) <= MAX_HOSTS:
        axes.set_xticks(x, host_names, rotation=0 if len(host_names) <= MAX_HOSTS // 4 else 60)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("host: medians over its ranks; lines: from the least to the most compute")


def _name_slow(axes: Axes, ratios: Mapping[int, float], names: Sequence[str]) -> None:
    """Mark slow ranks or hosts at the top, and name the slowest."""
    above = axes.get_xaxis_transform()
    axes.plot(list(ratios), [0.84] * len(ratios), "v", transform=above, color=VERMILION)
    slowest_indexes = sorted(ratios, key=lambda i: -ratios[i])[:MAX_NAMED]
    labels = [f"{names[i]} {ratios[i]:.1f}x" for i in slowest_indexes]
    if len(ratios) > MAX_NAMED:
        labels += [f"and {len(ratios) - MAX_NAMED} more"]
    if labels:
        text = f"more compute than the median: {', '.join(labels)}"
        axes.text(0.01, 0.97, text, transform=axes.transAxes, va="top", fontsize=9)


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
    """Return the label of losses: the ranks, or the number of ranks, and the total seconds."""
    ranks = [rank for loss in losses for rank in loss.ranks]
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    text = names if len(ranks) <= MAX_RANKS else f"{counted(len(ranks), 'rank')} lost"
    times = [loss.lost_s for loss in losses if loss.lost_s is not None]
    return text + (f": {sum(times):.2g} s" if times else "")
