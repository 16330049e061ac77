"""`hpctrain runs`: the runs below a folder."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json
from hpctrain.tools.report import history

EPILOG = """\b
Examples:
  hpctrain runs
  hpctrain runs studies/mine --json | jq -r '.[] | select(.status == "killed") | .folder'

summary.json gives the status; without it, `running` if a job holds the run's lock, else `killed`.
The result is the test accuracy or, in this order, test r2, test loss, train loss.
"""


@click.command(epilog=EPILOG)
@click.argument("folder", type=click.Path(path_type=Path), metavar="[DIR]", default="runs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def runs(folder: Path, as_json: bool) -> None:
    """List the runs in DIR, by default runs/, newest first."""
    entries = history.list_runs(folder)
    if as_json:
        say(to_json([entry.as_json() for entry in entries], indent=1))
    else:
        history.print_table(entries)
