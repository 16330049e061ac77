"""Paths in a recipe: relative to the file that they stand in, of --set to the current folder.

They are made absolute when they are read, so that a run's recipe.toml can be used from anywhere.
Its table [paths] has the texts as they were written, since these count for the recipe's hash.

    [data]                          [data]
    x = "x.npy"          ->         x = "/home/me/x.npy"

                                    [paths]
                                    "/home/me/x.npy" = "x.npy"
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief

PATHS = "paths"
_PATTERN = frozenset("*?[")
Table = dict[str, Any]


def make_absolute(tables: Table, keys: Iterable[str], folder: str | Path) -> None:
    """Make the paths under `keys` of [data] absolute, and the path [model] init.

    Raises UsageError for a file that exists only relative to the current folder.
    """
    written: Table = {}

    def absolute(text: str) -> str:
        if not text or os.path.isabs(text) or text.startswith("~"):
            return text
        path = os.path.join(os.path.abspath(folder), text)
        _must_not_lie_elsewhere(text, path)
        written[path] = text
        return path

    _replace_paths(tables, keys, absolute)
    if written:
        tables[PATHS] = {**tables.get(PATHS, {}), **written}
    model = tables.get("model")
    if isinstance(model, Mapping) and isinstance(init := model.get("init"), str) and init:
        tables["model"] = {**model, "init": str(Path(os.path.abspath(folder), init))}


def take_written(tables: Table) -> dict[str, str]:
    """Remove the table [paths] from `tables` and return it: {absolute path: text as written}."""
    written = tables.pop(PATHS, {})
    is_valid = isinstance(written, Mapping) and all(isinstance(x, str) for x in written.values())
    if not is_valid:
        raise UsageError(
            f"[paths]: expected a table of texts, which a run records, seen {brief(written)}"
        )
    return dict(written)


def as_written(tables: Table, keys: Iterable[str], written: Mapping[str, str]) -> Table:
    """Return `tables` with the paths as they were written."""
    copy = {**tables, "data": dict(tables.get("data", {}))}
    _replace_paths(copy, keys, lambda text: written.get(text, text))
    return copy


def used(tables: Table, keys: Iterable[str], written: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `written` for the paths of `tables`."""
    paths: dict[str, str] = {}

    def add(text: str) -> str:
        paths.update({text: written[text]} if text in written else {})
        return text

    _replace_paths({**tables, "data": dict(tables.get("data", {}))}, keys, add)
    return paths


def _replace_paths(tables: Table, keys: Iterable[str], change: Callable[[str], str]) -> None:
    data = tables.get("data")
    if not isinstance(data, Mapping):
        return  # refused later
    entries = dict(data)
    for key in keys:
        value = entries.get(key)
        if isinstance(value, str):
            entries[key] = change(value)
        elif isinstance(value, list):
            entries[key] = [change(x) if isinstance(x, str) else x for x in value]
    tables["data"] = entries


def _must_not_lie_elsewhere(text: str, path: str) -> None:
    """Raise UsageError for a path that is right from the current folder alone."""
    if _PATTERN & set(text) or "\0" in text or os.path.lexists(path) or not os.path.lexists(text):
        return
    relative = os.path.relpath(text, os.path.dirname(path[: -len(text)]) or "/")
    raise UsageError(
        f"[data] {brief(text)}: paths are relative to the recipe: expected {path}, seen none; for "
        f"the file in the current folder write {brief(relative)}"
    )
