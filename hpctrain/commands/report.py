"""`hpctrain report`: a page with the plots of a run."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.commands._options import report_packages
from hpctrain.core.printing import say


@click.command(epilog="\b\nExample:\n  hpctrain report runs/digits-20260101-120000")
@click.argument("run", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: the run's.")
def report(run: Path, out: Path | None) -> None:
    """Write a self-contained report.html; print its path.

    Its plots are also written as PNG.
    """
    with report_packages():  # late: only reports need matplotlib and jinja2
        from hpctrain.tools.report.page import write
    say(write(run, out or run))
