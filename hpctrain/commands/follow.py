"""`hpctrain follow`: the live view of a run."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.core.printing import say
from hpctrain.core.progress import describe_losses
from hpctrain.tools.report.follow import follow as follow_run

EPILOG = """\b
Examples:
  hpctrain follow runs/digits-20260101-120000
  hpctrain follow runs/first && hpctrain report runs/first

It reads the files of the run alone, so it works on a login node while a job trains.
"""


@click.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path), metavar="DIR")
@click.pass_context
def follow(context: click.Context, run: Path) -> None:
    """Show the progress of the run in DIR until it ends.

    It exits with the run's exit code.
    """
    summary = follow_run(run)
    status, reason = summary["status"], summary.get("reason") or ""
    say(reason if reason.startswith(status) else f"{status}: {reason}".removesuffix(": "))
    if losses := describe_losses(summary):
        say(losses)
    context.exit(summary.get("exit_code") or 0)
