"""`hpctrain compare`: runs beside each other."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.commands._options import report_packages
from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json
from hpctrain.tools.report import comparison

EPILOG = """\b
Examples:
  hpctrain compare runs/ring runs/tree
  hpctrain compare runs/* --plot losses.png
"""


@click.command(epilog=EPILOG)
@click.argument(
    "folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR DIR..."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also draw losses and accuracies: .png or .svg.",
)
def compare(folders: tuple[Path, ...], as_json: bool, plot: Path | None) -> None:
    """Compare results, times and recipes of runs, a column each."""
    if len(folders) < 2:
        raise UsageError(f"expected the folders of two or more runs, seen {folders[0]} alone")
    compared = comparison.compare(folders)
    if plot is not None:
        with report_packages():  # late: only plots need matplotlib
            from hpctrain.tools.report.comparison_plot import draw
        draw(folders, plot)
        say(f"wrote {plot}", err=True)
    if as_json:
        say(to_json(compared, indent=1))
    else:
        comparison.print_tables(compared)
