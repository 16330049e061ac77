"""CSV: csv/metrics.csv with a column per number, csv/about.json with configuration and summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.core import atomic, files
from hpctrain.core.files import MissingError
from hpctrain.core.strict_json import to_json
from hpctrain.training.loggers.tracker import Tracker, Values

LIMIT_BYTES = 1 << 40


class CsvTracker(Tracker):
    """A line per step; a number that is new adds a column, for which the file is written again."""

    kind = "csv"

    def begin(self, step: int, has_rows: bool) -> int:
        folder = self.folder
        self._path = folder / "metrics.csv"
        self._write_about(None)
        rows = [row for row in read_rows(self._path) if int(row["step"]) <= step]
        self._columns = [*rows[0]] if rows else ["step"]
        self._last_row: dict[str, Any] = rows.pop() if rows else {}
        self._rewrite(rows, self._last_row)
        return int(self._last_row.get("step", 0))

    def log(self, step: int, values: Values) -> None:
        row = {"step": str(step), **{name: _text(value) for name, value in values.items()}}
        new_columns = [name for name in row if name not in self._columns]
        if new_columns or row["step"] == self._last_row.get("step"):
            self._columns += new_columns
            rows = read_rows(self._path)
            if rows and row["step"] == rows[-1]["step"]:
                row = rows.pop() | row
            self._rewrite(rows, row)
        else:
            files.append_lines(self._path, _lines(self._columns, [row]), 2)
        self._last_row = row

    def end(self, summary: Mapping[str, Any]) -> None:
        self._write_about(summary)

    def _write_about(self, summary: Mapping[str, Any] | None) -> None:
        about = {"config": self.target.config, "summary": summary}
        atomic.replace(self.folder / "about.json", to_json(about, indent=1) + "\n", 2)

    def _rewrite(self, rows: Iterable[Mapping[str, str]], last_row: Mapping[str, str]) -> None:
        lines = [dict(zip(self._columns, self._columns, strict=True)), *rows]
        text = _lines(self._columns, [*lines, last_row] if last_row else lines)
        atomic.replace(self._path, text, 2)


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
