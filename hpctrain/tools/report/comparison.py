"""Several runs beside each other: results, times, and the keys in which their recipes differ.

Losses and accuracies of all are drawn in one picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table
from rich.text import Text

from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import print_table
from hpctrain.core.palette import COLORS, DASHES, MARKERS, plain
from hpctrain.core.run_files import run_folder
from hpctrain.tools.report import record
from hpctrain.tools.report.history import DEFAULT_WIDTH, NO_RECIPE
from hpctrain.tools.report.record import RunRecord
from hpctrain.training import recipe
from hpctrain.training.recipe_keys import list_all_keys

#: key of the summary: how it is written
FACTS: dict[str, Callable[[Any], str]] = {
    "status": str, "engine": str, "algorithm": str, "world_size": str, "steps": "{:,}".format,
    "since_step": "after step {:,}".format,
    "wall_s": "{:,.2f} s".format, "samples_per_s": "{:,.0f}".format,
    "compute_s": "{:,.2f} s".format, "wait_s": "{:,.2f} s".format, "wire_s": "{:,.2f} s".format,
    "data_wait_s": "{:,.2f} s".format,
    "lost_ranks": str, "lost_s": "{:,.2f} s".format, "spares_used": str,
    "ettr": lambda share: f"{100 * share:.2f} %",
}  # fmt: skip
NAMES = {
    "since_step": "times and samples/s",
    "world_size": "ranks",
    "samples_per_s": "samples/s",
    "wait_s": "wait (exposed wire)",
    "data_wait_s": "wait for data",
    "lost_s": "time without progress",
    "ettr": "ETTR",
}
METRICS = ("train_loss", "test_loss", "test_accuracy")


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Return {"runs": {folder: facts}, "recipes": {key: values}} of the runs in `folders`.

    `recipes`: see `find_differences`. Raises UsageError for a folder without a run, FileError for
    damaged files.
    """
    records = [record.read(folder) for folder in folders]
    recipes = [
        _fill_in(toml.parse(run.recipe, str(folder / run_folder.RECIPE)), folder)
        for run, folder in zip(records, folders, strict=True)
    ]
    return {
        "runs": {str(f): _collect(run) for f, run in zip(folders, records, strict=True)},
        "recipes": find_differences(recipes),
    }


def _fill_in(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe with the defaults of its keys; unchanged if this version refuses it."""
    try:
        return list_all_keys(recipe.check(tables, folder)) if tables else tables
    except UsageError:
        return tables


def _collect(run: RunRecord) -> dict[str, Any]:
    """Return the facts and metrics of a run, of its last row where there is no summary."""
    latest_values = {**(run.rows[-1] if run.rows else {}), **run.summary}
    latest_values["status"] = run.status
    if run.rows and "steps" not in run.summary:  # a row counts the steps of its interval
        latest_values["steps"] = run.rows[-1]["step"]
    latest_values["lost_ranks"] = sum(len(loss.ranks) for loss in run.losses()) or None
    if not latest_values["lost_ranks"]:
        latest_values |= dict.fromkeys(("lost_s", "ettr", "spares_used"))
    metrics = [
        key
        for key, value in latest_values.items()
        if key.startswith(("train_", "test_")) and not isinstance(value, list)
    ]
    keys = [key for key in (*FACTS, *metrics) if key != "since_step" or latest_values.get(key)]
    return {key: latest_values[key] for key in keys if latest_values.get(key) is not None}


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"table.key": value} of a recipe, without the hashes of its code."""
    flat_recipe: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat_recipe |= _flatten(value, f"{prefix}{key}.")
        elif not prefix.startswith(("code.", "paths.")):
            flat_recipe[prefix + key] = value
    return flat_recipe


def find_differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys, as "table.key", whose values differ; None where a recipe lacks one.

    A run from Python has an empty recipe: no key is compared with it.
    """
    flat_recipes = [_flatten(recipe) for recipe in recipes]
    values_by_key = {
        key: [tables.get(key) for tables in flat_recipes]
        for key in sorted(set().union(*flat_recipes))
    }
    # A run from Python has no recipe.
    compared_runs = [i for i, tables in enumerate(flat_recipes) if tables]
    recipe_names = {"recipe": [tables.get("run.name", NO_RECIPE) for tables in flat_recipes]}
    return (recipe_names if len(compared_runs) < len(flat_recipes) else {}) | {
        key: row
        for key, row in values_by_key.items()
        if any(row[i] != row[compared_runs[0]] for i in compared_runs)
    }


def print_tables(comparison: Mapping[str, Any]) -> None:
    """Print a column per run on stdout: its facts, then the keys in which the recipes differ."""
    runs = comparison["runs"]
    table = Table("", *(Column(Text(folder)) for folder in runs))
    for key in dict.fromkeys(key for facts in runs.values() for key in facts):
        name = NAMES.get(key, key.removesuffix("_s").replace("_", " "))
        values = (facts.get(key) for facts in runs.values())
        write = FACTS.get(key, "{:.4f}".format)
        table.add_row(name, *("-" if value is None else write(value) for value in values))
    if comparison["recipes"]:
        table.add_section()
    for key, values in comparison["recipes"].items():
        table.add_row(Text(key), *(Text("-" if x is None else str(x)) for x in values))
    print_table(table, DEFAULT_WIDTH)


def draw(folders: Sequence[Path], path: Path) -> None:
    """Write the plot to `path`, PNG or SVG by its suffix: by step and by wall time.

    A panel for each of METRICS that any run has; runs differ in colour and dashes.
    """
    from matplotlib.figure import Figure  # late: a table needs no matplotlib

    from hpctrain.tools.report.plots import MAX_MARKED_POINTS, UNITS, choose_unit, scale_losses

    runs = [record.read(folder) for folder in folders]
    drawn_metrics = [m for m in METRICS if any(np.isfinite(run.column(m)).any() for run in runs)]
    if not drawn_metrics:
        raise UsageError(f"--plot: expected rows of metrics, seen none in {folders[0]}")
    seconds = [np.cumsum(run.seconds_per_row("wall_s")) for run in runs]
    unit = choose_unit(max(clock[-1] for clock in seconds if len(clock)))
    figure = Figure((10, 0.8 + 2.6 * len(drawn_metrics)), layout="constrained")
    panels = figure.subplots(len(drawn_metrics), 2, sharex="col", sharey="row", squeeze=False)
    for metric, (by_step, by_time) in zip(drawn_metrics, panels, strict=True):
        for i, (run, clock) in enumerate(zip(runs, seconds, strict=True)):
            y = run.column(metric)
            is_finite = np.isfinite(y)
            style: dict[str, Any] = {
                "color": COLORS[i % len(COLORS)],
                "linestyle": DASHES[i % len(DASHES)],
            }
            if is_finite.sum() <= MAX_MARKED_POINTS:  # a lone point has no line
                style |= {"marker": MARKERS[i % len(MARKERS)], "markersize": 4}
            label = plain(str(folders[i])) if metric == drawn_metrics[0] else None
            by_step.plot(run.column("step")[is_finite], y[is_finite], label=label, **style)
            by_time.plot(clock[is_finite] / UNITS[unit], y[is_finite], **style)
        metric_values = np.concatenate([run.column(metric) for run in runs])
        for axes in (by_step, by_time):
            axes.grid(alpha=0.3)
            scale_losses(axes, metric_values)
        by_step.set_ylabel(metric.replace("_", " "))
    panels[-1][0].set_xlabel("step")
    panels[-1][1].set_xlabel(f"wall time in training [{unit}]")
    figure.legend(loc="outside upper center", frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from None
