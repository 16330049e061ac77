"""Tables on terminals of several widths: no line is too long, and no word is cut."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from hpctrain.core.fitted_table import fit_table

PATH = "/scratch/project_465000001/a-user/runs/digits-20260101-120000"
HEADINGS = ("started", "ranks", "time of a step", "folder")
CELLS = ("2026-01-01 12:00", "128", "12.5 ms", PATH)
#: width -> a line of the first row; numbers stay with their units
LINES = {
    200: f"│ 2026-01-01 12:00 │   128 │        12.5 ms │ {PATH} │",
    80: r"│ 2026-01-01 12:00 │   128 │        12.5 ms │ /scratch/project_4650\S+ │",
    52: r"2026-01-01 +128 +12\.5 ms /scratch/project_4650\S+",
    30: r"│ ranks        │ 128         │",
}


@pytest.mark.parametrize("width", LINES)
def test_no_word_is_cut(width):
    table = Table(title="runs")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in HEADINGS[1:3] else "left")
    for _ in range(2):
        table.add_row(*CELLS)
    console = Console(file=io.StringIO(), width=width)
    console.print(fit_table(table, console))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert any(re.fullmatch(LINES[width], line.rstrip()) for line in text.splitlines()), text
    joined = re.sub(r"[\s│]", "", text)
    assert all(joined.count(word) == 2 for word in ("128", "12.5ms"))
    assert set(PATH) <= set(joined)
