"""Output of a benchmark from rank 0: a table, JSON, and a progress bar while it runs.

On a terminal the table comes at the end, below the bar. In a batch log each row is a plain line as
soon as it is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hpctrain import machine
from hpctrain.bench.message_sizes import size_text
from hpctrain.core import progress
from hpctrain.core.errors import UsageError
from hpctrain.world import World

Row = Mapping[str, Any]
Text = Callable[[Row], str]
Column = tuple[str, Text]  #: heading, and the text of a row


def microseconds(key: str) -> Text:
    """Return a formatter of the seconds `key` of a row in microseconds; a dash if None."""
    return lambda row: "-" if row[key] is None else _four_digits(row[key] * 1e6)


def number(key: str, form: str) -> Text:
    """Return a formatter of `key` of a row; a dash if it is missing or None."""
    return lambda row: format(row[key], form) if row.get(key) is not None else "-"


def _four_digits(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


SIZE: Column = ("size", lambda row: size_text(row["bytes"]))
ALGORITHM: Column = ("algorithm", lambda row: row["algorithm"])
TIMES: tuple[Column, ...] = tuple(
    (f"{name} us", microseconds(f"{name}_s")) for name in ("median", "p5", "p95", "p99")
)
CORRECT: Column = ("correct", lambda row: "yes" if row["correct"] else "NO")
COLLECTIVE: tuple[Column, ...] = (
    SIZE,
    ALGORITHM,
    *TIMES,
    ("cold us", microseconds("cold_s")),
    ("algbw GB/s", number("algbw", ".3g")),
    ("busbw GB/s", number("busbw", ".3g")),
    ("of floor", number("share_of_floor", ".0%")),
    ("x native", number("times_native", ".2f")),
    CORRECT,
)


class RowPrinter:
    """Rank 0 prints rows of `columns` as they arrive; the other ranks print nothing."""

    def __init__(self, world: World, title: str, columns: Sequence[Column], total: int):
        """Expect `total` calls of `rows`."""
        self._columns, self._title, self._prints = columns, title, world.rank == 0
        console = progress.console()
        self._drawn = console.is_terminal and self._prints
        self._out = Console(
            file=sys.stdout, force_terminal=self._drawn, width=console.width if self._drawn else 160
        )
        self._table = Table(title=title)
        for heading, _ in columns:
            self._table.add_column(heading, justify="left" if heading == "algorithm" else "right")
        self._bar = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self._drawn,
            auto_refresh=False,  # a thread that draws would take a core from those who compute
        )
        self._task = self._bar.add_task("", total=total)

    def print_groups(self, groups: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Show groups of rows as they arrive; return all rows."""
        self._bar.start()
        self._print_line(f"# {self._title}")
        self._print_line(self._line([heading for heading, _ in self._columns]))
        rows: list[dict[str, Any]] = []
        for group in groups:
            rows += group
            self._print_table(group)
        self._bar.stop()
        if self._drawn:
            self._out.print(self._table)
        return rows

    def _print_table(self, group: Sequence[Row]) -> None:
        for row in group:
            words = [text(row) for _, text in self._columns]
            self._table.add_row(*words)
            self._print_line(self._line(words))
        self._bar.update(self._task, advance=1, refresh=True)

    def _line(self, words: Sequence[str]) -> str:
        headings = [heading for heading, _ in self._columns]
        widths = [20 if h == "algorithm" else max(8, len(h)) for h in headings]
        is_left = [h == "algorithm" for h in headings]
        pairs = zip(words, widths, is_left, strict=True)
        return "  ".join(
            w.ljust(n) if is_left_aligned else w.rjust(n) for w, n, is_left_aligned in pairs
        )

    def _print_line(self, line: str) -> None:
        if self._prints and not self._drawn:
            print(line, flush=True)


def report(world: World, rows: Sequence[Row], **about: Any) -> dict[str, Any]:
    """Return the content of the --json file: the machine's facts, `about`, and the rows."""
    return {"machine": machine.facts(world.hosts, world.transport), **about, "rows": list(rows)}


def write(world: World, path: Path | None, content: Mapping[str, Any]) -> None:
    """Let rank 0 write `content` to `path`, if there is one."""
    if path is not None and world.rank == 0:
        path.write_text(json.dumps(content, indent=1) + "\n")


def print_lines(world: World, lines: Iterable[str]) -> None:
    """Print `lines`, from rank 0."""
    if world.rank == 0:
        for line in lines:
            print(line, flush=True)


def must_be_writable(world: World, *paths: Path | None) -> None:
    """Raise UsageError on all ranks before the measurement if rank 0 cannot write to `paths`."""

    def update_bar() -> None:
        for path in filter(None, paths):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()
            except OSError as error:
                raise UsageError(f"{path} cannot be written: {error.strerror}") from None

    world.on_all_ranks(update_bar if world.rank == 0 else lambda: None)
