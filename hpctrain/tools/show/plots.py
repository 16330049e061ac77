"""The style of plots: how a figure is titled, explained and written; colours: core/palette.py."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot, which would look for a screen
from matplotlib.ticker import EngFormatter

from hpctrain.core.palette import plain

SECONDS_FORMAT = EngFormatter(unit="s")  #: 100 us, 1 ms


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
