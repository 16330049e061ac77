"""CSV: csv/metrics.csv with a column per number, csv/about.json with configuration and summary."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.core import atomic, files, opening
from hpctrain.core.files import MissingError
from hpctrain.core.strict_json import to_json
from hpctrain.training.loggers.tracker import Tracker, Values

LIMIT_BYTES = 1 << 40


class CsvTracker(Tracker):
    """A line per step, which later calls of that step replace.

    A number that is new adds a column, for which the file is written again.
    """

    kind = "csv"

    def begin(self, step: int, has_rows: bool) -> int:
        folder = self.folder
        self._path = folder / "metrics.csv"
        self._write_about(None)
        rows = [row for row in read_rows(self._path) if int(row["step"]) <= step]
        columns = [*rows[0]] if rows else ["step"]
        self._last_row: dict[str, Any] = rows.pop() if rows else {}
        self._rewrite(columns, rows, self._last_row)
        return int(self._last_row.get("step", 0))

    def log(self, step: int, values: Values) -> None:
        row = {"step": str(step), **{name: _text(value) for name, value in values.items()}}
        is_same = row["step"] == self._last_row.get("step")
        row = {**self._last_row, **row} if is_same else row
        if new_columns := [name for name in row if name not in self._columns]:
            rows = read_rows(self._path)
            self._rewrite([*self._columns, *new_columns], rows[:-1] if is_same else rows, row)
        else:
            if is_same:
                self._cut_last_row()
            files.append_lines(self._path, _lines(self._columns, [row]), 2)
        self._last_row = row

    def end(self, summary: Mapping[str, Any]) -> None:
        self._write_about(summary)

    def _cut_last_row(self) -> None:
        count = len(_lines(self._columns, [self._last_row]).encode())
        self._last_row = {}
        descriptor = opening.open_file(self._path, os.O_RDWR, 2)
        try:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - count)
        finally:
            os.close(descriptor)

    def _write_about(self, summary: Mapping[str, Any] | None) -> None:
        about = {"config": self.target.config, "summary": summary}
        atomic.replace(self.folder / "about.json", to_json(about, indent=1) + "\n", 2)

    def _rewrite(
        self, columns: list[str], rows: Iterable[Mapping[str, str]], last_row: Mapping[str, str]
    ) -> None:
        lines = [dict(zip(columns, columns, strict=True)), *rows]
        text = _lines(columns, [*lines, last_row] if last_row else lines)
        atomic.replace(self._path, text, 2)
        self._columns = columns


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the lines of a file by column, without a last one that was cut off."""
    try:
        whole_lines = files.read_text(path, LIMIT_BYTES, 2).rpartition("\n")[0]
    except MissingError:
        return []
    return list(csv.DictReader(io.StringIO(whole_lines)))


def _lines(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)
