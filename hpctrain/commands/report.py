"""`hpctrain report`: a page with the plots of a run."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say

MISSING_PACKAGES_MESSAGE = "reports need matplotlib and jinja2; run: pip install 'hpctrain[report]'"


@click.command(epilog="\b\nExample:\n  hpctrain report runs/digits-20260101-120000")
@click.argument("run", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: the run's.")
def report(run: Path, out: Path | None) -> None:
    """Write a self-contained report.html; print its path.

    Its plots are also written as PNG.
    """
    try:  # late: only reports need matplotlib and jinja2
        from hpctrain.report.page import write
    except ImportError as error:
        raise UsageError(f"{MISSING_PACKAGES_MESSAGE} ({error})") from None
    say(write(run, out or run))
