"""The report of a study: one HTML file that holds all it shows and needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tomli_w

from hpctrain.tools.report.page import encode, render, text_of
from hpctrain.tools.scaling.output import tables
from hpctrain.tools.scaling.results import Result

PAGE = "report.html"
CAPTIONS = {
    "scaling.png": "Samples/s and efficiency over sizes, beside the ideal; predictions dashed.",
    "time.png": "The time of a step of each size: compute, wait, other; the wire beside it.",
}


def page(result: Result, images: Mapping[str, bytes], changes: Sequence[str]) -> str:
    """Return the page as HTML; `images` are PNGs by file name."""
    table = tables.table(result)
    return render(
        __package__,
        title=tables.title(result.study),
        lead=list(tables.summary_lines(result)),
        gaps=len(result.of(tables.GAP)),
        sizes=len(result.study.sizes),
        images=encode({CAPTIONS[name]: png for name, png in images.items()}),
        headings=[str(column.header) or "remarks" for column in table.columns],
        rows=list(zip((row["kind"] for row in result.rows), tables.cells(result), strict=True)),
        facts=tables.facts(result),
        changes=changes,
        machine={name.replace("_", " "): text_of(value) for name, value in result.machine.items()},
        recipe=tomli_w.dumps(result.study.tables),
    )
