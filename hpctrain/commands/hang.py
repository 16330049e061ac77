"""`hpctrain hang`: every rank's last operations in a running, hung or dead job."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json

EPILOG = """\b
Examples:
  hpctrain hang runs/digits-20260101-120000
  hpctrain hang -n 10 runs/first
  hpctrain hang --json runs/first | jq .waited_for
  srun --overlap --ntasks-per-node=1 hpctrain hang --collect runs/first

The records of a running job lie in the memory of its nodes: only the ranks on this host are shown.
Records of other hosts follow once the job hangs or has died: `hpctrain launch`, which the scripts
of `hpctrain slurm` call too, moves them to DIR/watch; after other launchers --collect does, on each
node.
"""


@click.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR")
@click.option(
    "-n", "last", type=click.IntRange(0, 1024), default=0, metavar="N",
    help="Show each rank's last N operations; with --json 8 by default.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--collect", is_flag=True,
    help="Move the records on this host to DIR/watch, if the job has ended.",
)  # fmt: skip
def hang(run: Path, last: int, as_json: bool, collect: bool) -> None:
    """Show each rank's state and last operation in the job in DIR.

    The job may run, hang or be dead. States: alive; stopped (a process without heartbeats); dead;
    closed (its record was closed, as at the end of the run); unknown (on another host, or lost).
    """
    from hpctrain.core.run_files.folder_lock import is_locked
    from hpctrain.tools.report import hang as report
    from hpctrain.watch import node_file

    if collect:
        if is_locked(run):
            raise UsageError(f"{run}: its job runs; --collect is for a job that has ended")
        for node in node_file.collect(run / "watch"):
            say(f"node {node}: no records here", err=True)
        return
    job = report.read_job(run)
    if as_json:
        say(to_json(report.as_json(job, last or 8), indent=1))
    else:
        report.print_report(job, last)
