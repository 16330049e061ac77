"""Tables on terminals of any width: no word is cut, and text is no markup and no escape sequence.

wide enough     the table as it is
narrower        columns that wrap between words share the width
narrower still  the same without lines between columns
too narrow      a line per cell, its heading before it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table

from hpctrain.core.printing import printable

MAX_WORD = 24  #: a longer word, such as a path, is folded and does not widen its column


class PlainConsole(Console):
    """A console for which text is neither markup nor an escape sequence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the parts of what is printed; Rich's own control sequences stay."""
        for part in super().render(renderable, options):
            yield part if part.control else Segment(printable(part.text), part.style)


def make_table(
    headings: Iterable[str],
    rows: Iterable[Iterable[RenderableType]] = (),
    *left: str,
    title: str | None = None,
    caption: str | None = None,
) -> Table:
    """Return a table of `rows`; columns are aligned to the right, but for those named `left`."""
    columns = (Column(text, justify="left" if text in left else "right") for text in headings)
    table = Table(*columns, title=title, caption=caption)
    for row in rows:
        table.add_row(*row)
    return table


def stdout_console(width: int) -> PlainConsole:
    """Return the console on stdout, of `width` columns where that is no terminal."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=width)


def print_table(table: Table, width: int) -> None:
    """Print `table` on stdout, of `width` columns where that is no terminal."""
    console = stdout_console(width)
    console.print(fit_table(table, console))


def fit_table(table: Table, console: Console) -> Table:
    """Return `table` so that `console` shows all of its text."""
    sizes = [_measure_column(column, console) for column in table.columns]
    needed_widths = [min(size.minimum, MAX_WORD) for size in sizes]
    spare = console.width - sum(needed_widths) - 3 * len(sizes) - 1  # two spaces and a line each
    if spare < 0:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
        spare = console.width - sum(needed_widths) - (len(sizes) - 1)  # between them alone
    if spare < 0:
        return _split_rows(table)
    if spare < sum(size.maximum for size in sizes) - sum(needed_widths):
        widths = _share_width(spare, needed_widths, [size.maximum for size in sizes])
        for column, width in zip(table.columns, widths, strict=True):
            column.width, column.overflow = width, "fold"
    return table


def _share_width(spare: int, needed: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return widths from `needed` on to `wanted`: the narrowest columns grow first."""
    widths = list(needed)
    for _ in range(spare):
        growing = [i for i, width in enumerate(widths) if width < wanted[i]]
        widths[min(growing, key=widths.__getitem__)] += 1
    return widths


def _measure_column(column: Column, console: Console) -> Measurement:
    """Return the widths of what may not be broken, and of the longest line, in `column`.

    Words may not, nor numbers and their units, which are aligned to the right.
    """
    unlimited = console.options.update_width(1 << 16)
    header, *cells = (
        Measurement.get(console, unlimited, text) for text in (column.header, *column.cells)
    )
    if column.justify == "right":
        cells = [Measurement(cell.maximum, cell.maximum) for cell in cells]
    return Measurement(*(max(widths) for widths in zip(header, *cells, strict=True)))


def _split_rows(table: Table) -> Table:
    """Return a table of two columns: headings, and the cells row by row."""
    split_table = Table(title=table.title, caption=table.caption, show_header=False)
    split_table.add_column(overflow="fold")
    split_table.add_column(overflow="fold")
    headings: list[RenderableType] = [column.header for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        for heading, cell in zip(headings, cells, strict=True):
            if str(cell):
                split_table.add_row(heading, cell)
        split_table.add_section()
    return split_table
