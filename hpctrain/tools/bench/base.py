"""What benchmarks share: their options, with checks, and their output, written by rank 0.

The output is a table, JSON and a progress bar. On a terminal the table comes at the end, below the
bar. In a batch log each row is a plain line as soon as it is measured. Before allocation it is
checked that buffers fit into memory: otherwise the kernel kills ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpctrain.core import progress
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import fit_table, make_table
from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json
from hpctrain.hardware.memory import available_bytes
from hpctrain.hardware.pci import ROOT
from hpctrain.tools.bench.units import size_text
from hpctrain.transport import machine
from hpctrain.transport.device import gpus
from hpctrain.tuning import choose
from hpctrain.world import World

BAR_WIDTH = 36  #: of a bar without its title
Row = Mapping[str, Any]
RowFormatter = Callable[[Row], str]
Column = tuple[str, RowFormatter]  #: heading, and the formatter of its cells
SIZE_COLUMN: Column = ("size", lambda row: size_text(row["bytes"]))
ALGORITHM_COLUMN: Column = ("algorithm", lambda row: row["algorithm"])
CORRECT_COLUMN: Column = ("correct", lambda row: "yes" if row["correct"] else "NO")
MATPLOTLIB_HINT = "--plot needs matplotlib; run: pip install 'hpctrain[report]'"
OWN_BUFFERS = 3  #: the buffer to reduce, and two buffers of the roofline
RIVAL_BUFFERS = 2  #: copies made by other libraries


def microseconds_column(key: str) -> RowFormatter:
    """Return a formatter that shows the seconds in `row[key]` as microseconds, None as a dash."""
    return lambda row: "-" if row[key] is None else _four_digits(row[key] * 1e6)


def number_column(key: str, format_spec: str) -> RowFormatter:
    """Return a formatter that shows `row[key]`, a missing value or None as a dash."""
    return lambda row: format(row[key], format_spec) if row.get(key) is not None else "-"


def _four_digits(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


TIME_COLUMNS: tuple[Column, ...] = tuple(
    (f"{name} us", microseconds_column(f"{name}_s")) for name in ("median", "p5", "p95", "p99")
)
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
                cells = [text(row) for _, text in columns]
                table.add_row(*cells)
                if not is_drawn:
                    print_lines(world, [_row_line(cells, headings)])
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
    """Raise UsageError on all ranks before the measurement if rank 0 cannot write to `paths`.

    Leaves no new file.
    """

    def create_files() -> None:
        for path in filter(None, paths):
            is_new = not path.exists()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("a").close()
                if is_new:
                    path.unlink()
            except OSError as error:
                raise UsageError(f"{path} cannot be written: {error.strerror}") from None

    world.on_all_ranks(create_files if world.rank == 0 else lambda: None)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The options of every benchmark: rounds, other libraries, and output files."""

    iterations: int  #: timed rounds
    warm_up: int  #: untimed rounds before them
    json: Path | None
    plot: Path | None
    rivals: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for numbers that are too small, and a `plot` that cannot be drawn."""
        require_minimum("--iterations", self.iterations, 1)
        require_minimum("--warm-up", self.warm_up, 0)
        check_plot_path(self.plot)


def split_words(text: str) -> Iterable[str]:
    """Return the comma-separated words of `text` without duplicates."""
    return dict.fromkeys(word.strip() for word in text.split(",") if word.strip())


def require_minimum(flag: str, number: int, minimum: int) -> None:
    """Raise UsageError if `number` is less than `minimum`."""
    if number < minimum:
        raise UsageError(f"{flag}: expected at least {minimum}, seen {number}")


def check_plot_path(plot: Path | None) -> None:
    """Raise UsageError if `plot` has another suffix than .png or .svg, or without matplotlib."""
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot: expected a name that ends in .png or .svg, seen '{plot}'")
    try:
        import_module("hpctrain.tools.bench.plot")
    except ImportError as error:
        raise UsageError(f"{MATPLOTLIB_HINT} ({error})") from None


def check_host_memory(world: World, max_bytes: int, with_rivals: bool, root: Path = ROOT) -> None:
    """Raise UsageError on all ranks if buffers of `max_bytes` do not fit; collective.

    The least that a rank of a host sees counts for all of them, so that they raise one error.
    """
    texts = zip(world.hosts, world.gather(str(available_bytes(root))), strict=True)
    seen = [int(text) for host, text in texts if host == world.host and text != "None"]
    free_bytes = min(seen, default=None)
    world.on_all_ranks(lambda: _check_host(world, max_bytes, with_rivals, free_bytes))


def _check_host(world: World, max_bytes: int, with_rivals: bool, free_bytes: int | None) -> None:
    ranks = world.hosts.count(world.host)
    needed_bytes = max_bytes * (OWN_BUFFERS + RIVAL_BUFFERS * with_rivals)
    if free_bytes is not None and ranks * needed_bytes > free_bytes:
        max_fitting_bytes = free_bytes // (ranks * (needed_bytes // max_bytes))
        raise UsageError(
            f"--sizes: {size_text(max_bytes)} needs {_gib_text(needed_bytes)} in each of {ranks} "
            f"ranks on {world.host}, {_gib_text(ranks * needed_bytes)} in all, but only "
            f"{_gib_text(free_bytes)} are available; take at most "
            f"{size_text(max_fitting_bytes >> 20 << 20)}, or fewer ranks"
        )


def check_gpu_memory(world: World, max_bytes: int, needed_bytes: int) -> None:
    """Raise UsageError on all ranks if one has no GPU or too little GPU memory; collective.

    A rank needs `needed_bytes` for its buffers of up to `max_bytes`.
    """
    world.on_all_ranks(lambda: _check_gpu(world, max_bytes, needed_bytes))


def _check_gpu(world: World, max_bytes: int, needed_bytes: int) -> None:
    place = world.places[world.rank]
    if not place.gpu:
        raise UsageError(
            "--device gpu: expected a GPU for every rank, seen none; look at `hpctrain doctor`"
        )
    ranks, free_bytes = world.places.count(place), gpus.free_gpu_bytes()
    if ranks * needed_bytes > free_bytes:
        raise UsageError(
            f"--sizes: {size_text(max_bytes)} needs {_gib_text(needed_bytes)} in each of {ranks} "
            f"ranks on {place.gpu} of {place.node}, of which {_gib_text(free_bytes)} are free; "
            "take shorter ones, or fewer ranks"
        )


def _gib_text(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
