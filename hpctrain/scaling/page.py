"""The report of a study: one HTML file that holds all it shows and asks nothing of the network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib import resources

import jinja2
import tomli_w

from hpctrain.report.page import shown
from hpctrain.scaling import show
from hpctrain.scaling.results import Result

PAGE = "report.html"
SEEN = {
    "scaling.png": "Samples/s and efficiency over sizes, beside the ideal; predictions dashed.",
    "time.png": "The time of a step of each size: compute, wait, other; the wire beside it.",
}


def page(found: Result, images: Mapping[str, bytes], changes: Sequence[str]) -> str:
    """Return the page as HTML; `images` are PNGs by file name."""
    # Names and reasons come from recipes and exceptions: all of them are escaped.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = resources.files(__package__).joinpath("page.html").read_text()
    table = show.table(found)
    return environment.from_string(text).render(
        title=show.title(found.study),
        lead=list(show.lead(found)),
        gaps=len(found.of(show.GAP)),
        sizes=len(found.study.sizes),
        images={SEEN[name]: b64encode(png).decode() for name, png in images.items()},
        headings=[str(column.header) or "remarks" for column in table.columns],
        rows=list(zip((row["kind"] for row in found.rows), show.cells(found), strict=True)),
        facts=show.facts(found),
        changes=changes,
        machine={name.replace("_", " "): shown(one) for name, one in found.machine.items()},
        recipe=tomli_w.dumps(found.study.tables),
    )
