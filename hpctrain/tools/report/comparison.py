"""Several runs beside each other: results, times, and the keys in which their recipes differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import print_table
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
    "lost_ranks": str, "lost_s": "{:,.2f} s".format, "spares_used": str,
    "ettr": lambda share: f"{100 * share:.2f} %",
}  # fmt: skip
NAMES = {
    "since_step": "times and samples/s",
    "world_size": "ranks",
    "samples_per_s": "samples/s",
    "wait_s": "wait (exposed wire)",
    "lost_s": "time without progress",
    "ettr": "ETTR",
}


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
    """Return a recipe with the defaults of its keys; as it is if this version refuses it."""
    try:
        return list_all_keys(recipe.check(tables, folder)) if tables else tables
    except UsageError:
        return tables


def _collect(run: RunRecord) -> dict[str, Any]:
    """Return the facts and metrics of a run, of its last row where there is no summary."""
    latest = {**(run.rows[-1] if run.rows else {}), **run.summary}
    latest["status"] = run.status
    if run.rows and "steps" not in run.summary:  # a row counts the steps of its interval
        latest["steps"] = run.rows[-1]["step"]
    latest["lost_ranks"] = sum(len(loss.ranks) for loss in run.losses()) or None
    if not latest["lost_ranks"]:
        latest |= dict.fromkeys(("lost_s", "ettr", "spares_used"))
    metrics = [key for key in latest if key.startswith(("train_", "test_"))]
    keys = [key for key in (*FACTS, *metrics) if key != "since_step" or latest.get(key)]
    return {key: latest[key] for key in keys if latest.get(key) is not None}


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"table.key": value} of a recipe, without the hashes of its code."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif not prefix.startswith(("code.", "paths.")):
            flat[prefix + key] = value
    return flat


def find_differences(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys, as "table.key", whose values differ; None where a recipe lacks one.

    A run from Python has an empty recipe: no key is compared with it.
    """
    flat = [_flatten(recipe) for recipe in recipes]
    values = {key: [tables.get(key) for tables in flat] for key in sorted(set().union(*flat))}
    compared = [i for i, tables in enumerate(flat) if tables]  # a run from Python has no recipe
    names = {"recipe": [tables.get("run.name", NO_RECIPE) for tables in flat]}
    return (names if len(compared) < len(flat) else {}) | {
        key: row for key, row in values.items() if any(row[i] != row[compared[0]] for i in compared)
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
