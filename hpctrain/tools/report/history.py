"""The runs below a folder, newest first, as their files describe them; no MPI is needed.

Also the live view of a run in another job or on another node, from its files alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.core import progress
from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.core.metrics import make_criterion
from hpctrain.core.names import counted
from hpctrain.core.printing import say
from hpctrain.core.run_files import run_folder, sweep_folder
from hpctrain.core.run_files.folder_lock import is_locked
from hpctrain.tools.report import record
from hpctrain.tools.report.record import RunRecord

DEFAULT_WIDTH = 130  # characters, if stdout is no terminal
#: The first that a run has is its result.
RESULTS = ("test_accuracy", "test_r2", "test_loss", "train_loss")
NO_RECIPE = "(Python)"  #: in place of a recipe's name
RUNNING, KILLED, DAMAGED = "running", "killed", "damaged"
DONE, WAITING = "done", "waiting"
log = logging.getLogger(__name__)
POLL_S = 1.0
SILENT_S = 30.0  #: a shared file system may show a lock, or its end, so much later


@dataclass(frozen=True)
class HistoryEntry:
    """A run or a sweep in a line; None where its files do not tell."""

    started: float  #: of the last part of the run; seconds since the epoch
    recipe: str
    engine: str | None
    ranks: int | None
    status: str  #: the summary's, or RUNNING, KILLED, or DAMAGED with the fault
    step: int | None
    metric: str | None  #: of RESULTS
    value: float | None
    folder: str
    lost_ranks: int = 0  #: that the run survived
    members: dict[str, int] | None = None  #: of a sweep, their number by status

    def as_json(self) -> dict[str, Any]:
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.started))
        return {**asdict(self), "started": started}


def list_runs(folder: Path, each_member: bool = False) -> list[HistoryEntry]:
    """Return the runs in `folder`, the last started first; `folder` may be a run itself.

    A sweep is an entry, with `each_member` one for each of its runs; of the folder of a sweep the
    entries are its members, in their order. Raises UsageError if there are none.
    """
    if sweep_folder.is_sweep(folder):
        return list_members(folder)
    entries = [read_entry(run) for run in _find_folders(folder)]
    for sweep in sweep_folder.find(folder):
        entries += list_members(sweep) if each_member else [_summarize(sweep)]
    if not entries:
        raise UsageError(
            f"{folder}: expected the folder of a run, or one that holds runs, seen none"
        )
    return sorted(entries, key=lambda entry: entry.started, reverse=True)


def _find_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs; a job array's lie below its folder."""
    tasks = (*folder.glob("*/nodes-*"), *folder.glob("*/*=*"))
    for path in (folder, *folder.glob("*"), *tasks):
        if _is_run(path) and (path == folder or not sweep_folder.is_sweep(path.parent)):
            yield path


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in record.FILES)


def list_members(folder: Path) -> list[HistoryEntry]:
    """Return an entry for each member of the sweep in `folder`, in order; raise FileError."""
    sweep = sweep_folder.read(folder)
    started = (folder / sweep_folder.SWEEP).stat().st_mtime
    recipe = sweep.recipe.rpartition("/")[2].removesuffix(".toml")
    blank = (None, None, WAITING, None, None, None)
    return [
        read_entry(run) if _is_run(run) else HistoryEntry(started, recipe, *blank, str(run))
        for run in (folder / member.name for member in sweep.members)
    ]


def _summarize(folder: Path) -> HistoryEntry:
    """Return the entry of a sweep: its members by status, and the best result of those."""
    try:
        entries = list_members(folder)
    except UsageError as error:
        started = (folder / sweep_folder.SWEEP).stat().st_mtime
        blank = (None, None, f"{DAMAGED}: {error}", None, None, None)
        return HistoryEntry(started, "-", *blank, str(folder))
    counts = Counter(entry.status.partition(":")[0] for entry in entries)
    others = [f"{count} {status}" for status, count in counts.items() if status != DONE]
    latest = max(entries, key=lambda entry: entry.started)
    metric = next((name for name in RESULTS if any(e.metric == name for e in entries)), None)
    criterion = metric and make_criterion(metric, None, "result")
    values = [e.value for e in entries if e.metric == metric and e.value is not None]
    return replace(
        latest,
        status=", ".join([f"{counts[DONE]} of {len(entries)} done", *others]),
        step=None,
        metric=metric,
        value=max(values, key=criterion.goodness) if criterion else None,
        folder=str(folder),
        lost_ranks=sum(entry.lost_ranks for entry in entries),
        members=dict(counts),
    )


def read_entry(run: Path) -> HistoryEntry:
    """Return the entry of the run in folder `run`; its status names damaged files."""
    started = max((run / name).stat().st_mtime for name in record.FILES if (run / name).exists())
    if (run / run_folder.RECIPE).exists():  # written at the start of each part
        started = (run / run_folder.RECIPE).stat().st_mtime
    empty_values = dict.fromkeys(("engine", "ranks", "step", "metric", "value"))
    try:
        values = _describe_run(run, record.read(run))
    except (UsageError, ValueError) as error:
        values = {**empty_values, "recipe": "-", "status": f"{DAMAGED}: {error}"}
    return HistoryEntry(started=started, folder=str(run), **values)


def _describe_run(run: Path, contents: RunRecord) -> dict[str, Any]:
    recipe = toml.parse(contents.recipe, str(run / run_folder.RECIPE))
    last_row = contents.rows[-1] if contents.rows else {}
    latest_values = {**last_row, **contents.summary}
    unfinished = RUNNING if is_locked(run) else KILLED
    metric = next((name for name in RESULTS if latest_values.get(name) is not None), None)
    compute_seconds = (last_row.get("ranks") or {}).get("compute_s")
    return {
        "recipe": recipe.get("run", {}).get("name") or NO_RECIPE,
        "engine": contents.summary.get("engine") or recipe.get("engine", {}).get("kind"),
        "ranks": contents.summary.get("world_size") or (compute_seconds and len(compute_seconds)),
        "status": contents.summary.get("status", unfinished),
        "step": last_row.get("step"),
        "metric": metric,
        "value": latest_values[metric] if metric else None,
        "lost_ranks": sum(len(loss.ranks) for loss in contents.losses()),
    }


def find_newest(folder: Path, recipe: str) -> Path:
    """Return the folder of the last started run of `recipe` below `folder`.

    Raises UsageError if there is none.
    """
    runs = list_runs(folder) if folder.is_dir() else []
    run_folders = [run.folder for run in runs if run.recipe == recipe and run.members is None]
    if not run_folders:
        raise UsageError(
            f"--resume: expected a run of recipe '{recipe}' in {folder}/, seen none; name its "
            "folder: --resume=DIR"
        )
    return Path(run_folders[0])


def print_table(entries: Sequence[HistoryEntry]) -> None:
    """Print a row per run on stdout."""
    from hpctrain.core.fitted_table import make_table
    from hpctrain.core.fitted_table import print_table as print_fitted

    headings = ("started", "recipe", "engine", "ranks", "status", "step", "result", "folder")
    print_fitted(make_table(headings, map(_entry_cells, entries), *headings), DEFAULT_WIDTH)


def _entry_cells(entry: HistoryEntry) -> tuple[str, ...]:
    lost = f", {counted(entry.lost_ranks, 'rank')} lost" if entry.lost_ranks else ""
    result = "-" if entry.value is None else f"{entry.metric} {entry.value:.4f}"
    return (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.started)), entry.recipe,
        entry.engine or "-", str(entry.ranks or "-"), entry.status + lost, str(entry.step or "-"),
        result.replace("_", " "), entry.folder,
    )  # fmt: skip


def follow(
    run: Path,
    wait: Callable[[float], None] = time.sleep,
    take: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> dict[str, Any]:
    """Show rows of metrics as they come, on stderr; return the summary once the run has ended.

    On a terminal a progress bar, else a line per row. A run that was killed writes no summary:
    after a while without its lock this is said, and the view goes on, as the run may be resumed.
    `take` gets all rows at each look. Raises UsageError if `run` holds no run, FileError for
    damaged files.
    """
    record.read(run)
    bar: progress.Bar | None = None
    last_step, silent_s = 0, 0.0
    while True:
        summary = run_folder.read_summary(run)  # first: rows that were written before it count
        take(all_rows := run_folder.rows(run))
        rows = [row for row in all_rows if row["step"] > last_step]
        for row in rows:
            last_step, total = row["step"], row.get("total_steps") or row["step"]
            if bar is None and summary is None:
                bar = progress.open_bar(run.resolve().name, last_step, total)
            if bar is None:
                say(progress.line(row, total), err=True)
            else:
                facts = map(row.get, ("epoch", "train_loss", "samples_per_s"))
                bar.show(last_step, *facts)
                if lost := progress.describe_lost(row):
                    bar.print(f"step {last_step}: {lost}")
        if summary is not None:
            if bar is not None:
                bar.close(last_step)
            return summary
        silent_s = 0.0 if rows or is_locked(run) else silent_s + POLL_S
        if silent_s == SILENT_S:
            log.warning("%s: no job holds its lock: it may have been killed; Ctrl-C ends this", run)
        wait(POLL_S)
