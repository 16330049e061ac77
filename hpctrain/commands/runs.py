"""`hpctrain runs | compare | follow | hang | report`: runs, by the files of their folders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpctrain.commands._options import complete_choices, report_packages
from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.core.progress import describe_losses
from hpctrain.core.run_files import sweep_folder
from hpctrain.core.strict_json import to_json

EPILOG = """\b
Examples:
  hpctrain runs                                       lists the runs in runs/
  hpctrain runs studies/mine --json | jq -r '.[] | select(.status == "killed") | .folder'
  hpctrain runs export --to tensorboard runs/first
"""
LIST_EPILOG = """\b
Examples:
  hpctrain runs
  hpctrain runs studies/mine
  hpctrain runs runs/sweep                            the runs of a sweep

summary.json gives the status; without it, `running` if a job holds the run's lock, else `killed`;
`waiting` for a run of a sweep that has not begun.
The result is the test accuracy or, in this order, test r2, test loss, train loss.
"""
COMPARE_EPILOG = """\b
Examples:
  hpctrain compare runs/ring runs/tree
  hpctrain compare runs/* --plot losses.png
  hpctrain compare runs/sweep                         the best member first

The members of a sweep are sorted by the best values of the metric of [checkpoint] keep_best, else
of [early_stop]; else by their last results, as `hpctrain runs` shows them.
"""
FOLLOW_EPILOG = """\b
Examples:
  hpctrain follow runs/digits-20260101-120000
  hpctrain follow runs/first && hpctrain report runs/first
  WANDB_MODE=online hpctrain follow --to wandb runs/first

It reads the files of the run alone, so it works on a login node while a job trains.
"""
EXPORT_EPILOG = """\b
Examples:
  hpctrain runs export --to tensorboard runs/* && tensorboard --logdir runs
  hpctrain runs export --to csv,mlflow runs/first
  hpctrain runs export --to wandb runs/first && wandb sync runs/first/wandb/offline-run-*

Each tracker needs its extra: pip install 'hpctrain[tensorboard]', 'hpctrain[wandb]' or
'hpctrain[mlflow]'. Files that are there already are made again.
"""
HANG_EPILOG = """\b
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


class RunsGroup(click.Group):
    """The commands on runs; without the name of one, `list`."""

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        is_listing = not words or words[0] not in (*self.commands, *context.help_option_names)
        return super().parse_args(context, ["list", *words] if is_listing else words)


@click.group(cls=RunsGroup, epilog=EPILOG)
def runs() -> None:
    """List runs, follow one, or export their rows to a tracker.

    `hpctrain runs [DIR]` is `hpctrain runs list [DIR]`.
    """


@runs.command("list", epilog=LIST_EPILOG)
@click.argument("folder", type=click.Path(path_type=Path), metavar="[DIR]", default="runs")
@click.option("--all", "each_member", is_flag=True, help="A row for each run of a sweep.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_runs(folder: Path, each_member: bool, as_json: bool) -> None:
    """List the runs in DIR, by default runs/, newest first.

    A sweep is a row; with --all, or if DIR is its folder, each of its runs is one.
    """
    from hpctrain.tools.report import history  # late: `hang` and `report` read no rows

    entries = history.list_runs(folder, each_member)
    if as_json:
        say(to_json([entry.as_json() for entry in entries], indent=1))
    else:
        history.print_table(entries)


@click.command(epilog=COMPARE_EPILOG)
@click.argument(
    "folders",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR DIR... | SWEEP",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also draw losses and accuracies: .png or .svg.",
)
def compare(folders: tuple[Path, ...], as_json: bool, plot: Path | None) -> None:
    """Compare results, times and recipes of runs, a column each; or the runs of one sweep."""
    from hpctrain.tools.report import comparison, sweep  # late: other commands read no recipes

    sweeps = [folder for folder in folders if sweep_folder.is_sweep(folder)]
    if len(folders) < 2 and not sweeps:
        raise UsageError(f"expected the folders of two or more runs, seen {folders[0]} alone")
    if sweeps and len(folders) == 1:
        result = sweep.compare(folders[0])
        facts, show, folders = result.as_json(), partial(sweep.print_result, result), result.runs
    else:
        facts = comparison.compare(folders)
        show = partial(comparison.print_tables, facts)
    if plot is not None:
        with report_packages():
            comparison.draw(folders, plot)
        say(f"wrote {plot}", err=True)
    if as_json:
        say(to_json(facts, indent=1))
    else:
        show()


def _to_option(required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option that names trackers."""
    return click.option(
        "--to",
        "names",
        multiple=True,
        required=required,
        metavar="NAME",
        callback=lambda context, option, texts: tuple(
            dict.fromkeys(name for text in texts for name in config.split_names(text))
        ),
        shell_complete=complete_choices(("tensorboard", "wandb", "mlflow", "csv")),
        help="tensorboard, wandb, mlflow or csv: write its files into DIR; several with commas.",
    )


@runs.command(epilog=EXPORT_EPILOG)
@click.argument(
    "folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR..."
)
@_to_option(required=True)
def export(folders: tuple[Path, ...], names: tuple[str, ...]) -> None:
    """Write the rows of the runs in DIR... as a tracker has them.

    They are the files that `[log] to` writes while a run trains. Prints the folders written.
    """
    from hpctrain.tools.report.export import export as export_run

    for run in folders:
        for name in names:
            say(export_run(run, name))


@click.command(epilog=FOLLOW_EPILOG)
@click.argument("run", type=click.Path(path_type=Path), metavar="DIR")
@_to_option(required=False)
@click.pass_context
def follow(context: click.Context, run: Path, names: tuple[str, ...]) -> None:
    """Show the progress of the run in DIR until it ends.

    It exits with the run's exit code.
    """
    from hpctrain.tools.report import history

    exports = []
    if names:
        from hpctrain.tools.report.export import Export  # late: loads what a training needs

        exports = [Export(run, name) for name in names]

    def update(rows: list[dict[str, Any]]) -> None:
        for item in exports:
            item.update(rows)

    summary = history.follow(run, take=update)
    for item in exports:
        item.end(summary)
        say(f"wrote {item.folder}", err=True)
    status, reason = summary["status"], summary.get("reason") or ""
    say(reason if reason.startswith(status) else f"{status}: {reason}".removesuffix(": "))
    if losses := describe_losses(summary):
        say(losses)
    context.exit(summary.get("exit_code") or 0)


runs.add_command(follow)


@click.command(epilog=HANG_EPILOG)
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
    from hpctrain.tools.report import hang as ranks
    from hpctrain.watch import node_file

    if collect:
        if is_locked(run):
            raise UsageError(f"{run}: its job runs; --collect is for a job that has ended")
        for node in node_file.collect(run / "watch"):
            say(f"node {node}: no records here", err=True)
        return
    job = ranks.read_job(run)
    if as_json:
        say(to_json(ranks.as_json(job, last or 8), indent=1))
    else:
        ranks.print_report(job, last)


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
