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
from hpctrain.tools.bench.options import Bench
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


def print_groups(
    world: World,
    title: str,
    columns: Sequence[Column],
    groups: Iterable[list[dict[str, Any]]],
    group_count: int,
) -> list[dict[str, Any]]:
    """Print groups of rows from rank 0 as they arrive, `group_count` in all; return all rows."""
    console, headings = progress.console(), [heading for heading, _ in columns]
    is_drawn = console.is_terminal and world.rank == 0
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not is_drawn,
        auto_refresh=False,  # a drawing thread would take a core from a rank
    )
    is_wide = len(title) < console.width - BAR_WIDTH
    task = bar.add_task(title if is_wide else "", total=group_count)
    table = make_table(headings, (), "algorithm", title=title)
    rows: list[dict[str, Any]] = []
    with bar:
        if not is_drawn:
            print_lines(world, [f"# {title}", _row_line(headings, headings)])
        for group in groups:
            for row in group:
                words = [text(row) for _, text in columns]
                table.add_row(*words)
                if not is_drawn:
                    print_lines(world, [_row_line(words, headings)])
            rows += group
            bar.update(task, advance=1, refresh=True)
    if is_drawn:
        stdout = progress.stdout_console(160)
        stdout.print(fit_table(table, stdout))
    return rows


def _row_line(words: Sequence[str], headings: Sequence[str]) -> str:
    return "  ".join(
        word.ljust(20) if heading == "algorithm" else word.rjust(max(8, len(heading)))
        for word, heading in zip(words, headings, strict=True)
    )


def find_noise(world: World, rows: Sequence[Row]) -> float | None:
    """Return the spread of repeats if it exceeds the limit of `tune`, and print so; else None."""
    noisy = choose.exceeding_spread(row["spread"] for row in rows)
    if noisy is not None:
        print_lines(world, [choose.noise_warning(noisy, "measure")])
    return noisy


def save(
    world: World,
    options: Bench,
    rows: Sequence[Row],
    title: str,
    drawing: Callable[[ModuleType], Callable[..., None]],
    about: Mapping[str, Any],
) -> None:
    """Write --json and --plot from rank 0; `drawing` picks a function of tools/bench/plot.py.

    The --json file has facts of the machine, `about`, the noise and the rows.
    """
    facts, noisy = machine.facts(world.hosts, world.transport), find_noise(world, rows)
    if options.json is not None and world.rank == 0:
        content = {"machine": facts, **about, "noisy": noisy, "rows": list(rows)}
        options.json.write_text(to_json(content, indent=1) + "\n")
        report_file(options.json)
    if options.plot is not None and world.rank == 0:
        drawing(import_module("hpctrain.tools.bench.plot"))(rows, title, options.plot)
        report_file(options.plot)


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
