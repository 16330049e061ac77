"""Tables on terminals of several widths: no line is too long, and no word is cut."""

from __future__ import annotations

import io
import re

import pytest
from rich.table import Table
from rich.text import Text

from hpctrain.core.fitted_table import PlainConsole, fit_table
from hpctrain.core.printing import printable

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
    console = PlainConsole(file=io.StringIO(), width=width)
    console.print(fit_table(table, console))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    assert any(re.fullmatch(LINES[width], line.rstrip()) for line in text.splitlines()), text
    joined = re.sub(r"[\s│]", "", text)
    assert all(joined.count(word) == 2 for word in ("128", "12.5ms"))
    assert set(PATH) <= set(joined)


FOREIGN = ("[b]head[/b]", "\x1b[2J[/i]", "\x1b]0;x\x9b")


@pytest.mark.parametrize("width", [20, 60])
def test_text_is_neither_markup_nor_an_escape_sequence(width):
    console = PlainConsole(file=io.StringIO(), width=width, force_terminal=True)
    table = Table(FOREIGN[0], title="a [red]title", caption=":smile:")
    table.add_row(FOREIGN[1])
    table.add_row(Text(FOREIGN[2]))
    console.print(fit_table(table, console))
    text = console.file.getvalue()
    for shown in ("a [red]title", ":smile:", *(printable(cell)[:10] for cell in FOREIGN)):
        assert shown in text, text
    assert not re.search("\x1b(?!\\[[0-9;]*m)|\x9b", text)
