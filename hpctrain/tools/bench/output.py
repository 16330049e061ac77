"""Output of a benchmark, written by rank 0: a table, JSON and a progress bar.

On a terminal the table comes at the end, below the bar. In a batch log each row is a plain line as
soon as it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpctrain.core import progress
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import fit_table
from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json
from hpctrain.tools.bench.options import Options
from hpctrain.tools.bench.units import size_text
from hpctrain.tools.show.tables import make_table
from hpctrain.transport import machine
from hpctrain.tuning import choose
from hpctrain.world import World

BAR_WIDTH = 36  #: of a bar without its title
Row = Mapping[str, Any]
RowFormatter = Callable[[Row], str]
Column = tuple[str, RowFormatter]  #: heading, and the formatter of its cells


def microseconds_column(key: str) -> RowFormatter:
    """Return a formatter that shows the seconds in `row[key]` as microseconds, None as a dash."""
    return lambda row: "-" if row[key] is None else _four_digits(row[key] * 1e6)


def number_column(key: str, format_spec: str) -> RowFormatter:
    """Return a formatter that shows `row[key]`, a missing value or None as a dash."""
    return lambda row: format(row[key], format_spec) if row.get(key) is not None else "-"


def _four_digits(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


SIZE_COLUMN: Column = ("size", lambda row: size_text(row["bytes"]))
ALGORITHM_COLUMN: Column = ("algorithm", lambda row: row["algorithm"])
TIME_COLUMNS: tuple[Column, ...] = tuple(
    (f"{name} us", microseconds_column(f"{name}_s")) for name in ("median", "p5", "p95", "p99")
)
CORRECT_COLUMN: Column = ("correct", lambda row: "yes" if row["correct"] else "NO")
COLLECTIVE_COLUMNS: tuple[Column, ...] = (
    SIZE_COLUMN,
    ALGORITHM_COLUMN,
    *TIME_COLUMNS,
    ("cold us", microseconds_column("cold_s")),
    ("algbw GB/s", number_column("algbw", ".3g")),
    ("busbw GB/s", number_column("busbw", ".3g")),
    ("of floor", number_column("share_of_floor", ".0%")),
    ("x native", number_column("times_native", ".2f")),
    CORRECT_COLUMN,
)


class RowPrinter:
    """Rank 0 prints rows of `columns` as they arrive; the other ranks print nothing."""

    def __init__(self, world: World, title: str, columns: Sequence[Column], group_count: int):
        """Expect `group_count` groups of rows."""
        self._columns, self._title, self._is_printing_rank = columns, title, world.rank == 0
        console = progress.console()
        self._is_terminal = console.is_terminal and self._is_printing_rank
        self._console = progress.stdout_console(160)
        self._table = make_table((heading for heading, _ in columns), (), "algorithm", title=title)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not self._is_terminal,
            auto_refresh=False,  # a drawing thread would take a core from a rank
        )
        is_wide = len(title) < console.width - BAR_WIDTH
        self._task = self._bar.add_task(title if is_wide else "", total=group_count)

    def print_groups(self, groups: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Print groups of rows as they arrive; return all rows."""
        self._bar.start()
        self._print_line(f"# {self._title}")
        self._print_line(self._row_line([heading for heading, _ in self._columns]))
        rows: list[dict[str, Any]] = []
        for group in groups:
            rows += group
            self._show_rows(group)
        self._bar.stop()
        if self._is_terminal:
            self._console.print(fit_table(self._table, self._console))
        return rows

    def _show_rows(self, group: Sequence[Row]) -> None:
        for row in group:
            words = [text(row) for _, text in self._columns]
            self._table.add_row(*words)
            self._print_line(self._row_line(words))
        self._bar.update(self._task, advance=1, refresh=True)

    def _row_line(self, words: Sequence[str]) -> str:
        headings = [heading for heading, _ in self._columns]
        widths = [20 if h == "algorithm" else max(8, len(h)) for h in headings]
        left_aligned = [h == "algorithm" for h in headings]
        pairs = zip(words, widths, left_aligned, strict=True)
        return "  ".join(
            word.ljust(width) if is_left_aligned else word.rjust(width)
            for word, width, is_left_aligned in pairs
        )

    def _print_line(self, line: str) -> None:
        if self._is_printing_rank and not self._is_terminal:
            say(line)


def find_noise(world: World, rows: Sequence[Row]) -> float | None:
    """Return the spread of repeats if it exceeds the limit of `tune`, and print so; else None."""
    noisy = choose.exceeding_spread(row["spread"] for row in rows)
    if noisy is not None:
        print_lines(world, [choose.noise_warning(noisy, "measure")])
    return noisy


def make_report(
    world: World, rows: Sequence[Row], noisy: float | None = None, **about: Any
) -> dict[str, Any]:
    """Return the content of the --json file: facts of the machine, `about` and the rows.

    `noisy`: see `find_noise`.
    """
    facts = machine.facts(world.hosts, world.transport)
    return {"machine": facts, **about, "noisy": noisy, "rows": list(rows)}


def save(
    world: World,
    options: Options,
    rows: Sequence[Row],
    title: str,
    drawing: Callable[[ModuleType], Callable[..., None]],
    about: Mapping[str, Any],
) -> None:
    """Write --json and --plot from rank 0; `drawing` picks a function of tools/bench/plot.py."""
    write_json(world, options.json, make_report(world, rows, find_noise(world, rows), **about))
    if options.plot is not None and world.rank == 0:
        drawing(import_module("hpctrain.tools.bench.plot"))(rows, title, options.plot)
        report_file(options.plot)


def write_json(world: World, path: Path | None, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` from rank 0, unless `path` is None."""
    if path is not None and world.rank == 0:
        path.write_text(to_json(content, indent=1) + "\n")
        report_file(path)


def report_file(path: Path) -> None:
    """Print the path of a file that was written."""
    say(f"wrote {path}", err=True)


def print_lines(world: World, lines: Iterable[str]) -> None:
    """Print `lines` from rank 0."""
    if world.rank == 0:
        for line in lines:
            say(line)


def check_writable(world: World, *paths: Path | None) -> None:
    """Raise UsageError on all ranks before the measurement if rank 0 cannot write to `paths`."""

    def create_files() -> None:
        for path in filter(None, paths):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()
            except OSError as error:
                raise UsageError(f"{path} cannot be written: {error.strerror}") from None

    world.on_all_ranks(create_files if world.rank == 0 else lambda: None)
