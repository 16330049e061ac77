"""Tables of words: a heading per column, a row per thing."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Column, Table


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
