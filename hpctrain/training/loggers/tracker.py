"""A tracker behind one interface: configuration, rows of numbers, summary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from hpctrain.core import opening
from hpctrain.core.strict_json import to_json

#: numbers of a step by name; None where an interval has no value
Values = Mapping[str, float | None]


@dataclass(frozen=True)
class Target:
    """The place of a run in a tracker, and its configuration."""

    folder: Path  #: of the run; each tracker has a folder of its kind within
    project: str
    name: str
    config: Mapping[str, Any]  #: JSON data

    @property
    def config_json(self) -> str:
        """The configuration as JSON, indented."""
        return to_json(self.config, indent=1)


class Tracker:
    """The files of one run in a tracker; its methods run in one thread, and may raise anything."""

    kind: str

    def __init__(self, target: Target):
        self.target = target

    @property
    def folder(self) -> Path:
        """The tracker's own folder in the run's, which is made."""
        path = self.target.folder / self.kind
        opening.make_folder(path)
        return path

    def begin(self, step: int, has_rows: bool) -> int:
        """Open the files, drop what is later than `step`, and write the configuration.

        Returns the last step, at most `step`, that the files hold; later rows are written again.
        `has_rows`: all rows until `step` can be. May be called again, after a loss of ranks.
        """
        raise NotImplementedError

    def log(self, step: int, values: Values) -> None:
        """Write the numbers of a step, which is not before the last one."""
        raise NotImplementedError

    def end(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, close the files."""
        raise NotImplementedError


def row_values(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a row of metrics.jsonl, null for those that are not finite.

    Lists, as of the ranks' times, are left out: they would be a curve per rank.
    """
    return {
        name: None if value is None or not isfinite(value) else value
        for name, value in row.items()
        if name != "step" and (value is None or isinstance(value, int | float))
    }


def present(values: Values) -> dict[str, float]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tables, such as ("run.seed", 0); lists as JSON."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", json.dumps(value, default=str)
        else:
            yield f"{prefix}{name}", value


def rows_after(step: int, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows after `step`."""
    return [row for row in rows if row["step"] > step]
