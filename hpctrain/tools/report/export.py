"""The files of trackers, made from metrics.jsonl: of runs that have ended, or while they train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.core import config, opening
from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.run_files.folder_lock import is_locked
from hpctrain.tools.report import history, record
from hpctrain.training.loggers import LOGGERS
from hpctrain.training.loggers.loggers import EXPORTED, PROJECT
from hpctrain.training.loggers.options import LogOptions
from hpctrain.training.loggers.run_loggers import make_config
from hpctrain.training.loggers.tracker import row_values

Rows = Sequence[Mapping[str, Any]]


class Export:
    """The rows of one run in one tracker."""

    def __init__(self, run: Path, name: str):
        """Raise UsageError for an unknown name, and for a missing package."""
        logger = config.pick(LOGGERS, name, "logger")()
        contents = record.read(run)
        self._tables = toml.parse(contents.recipe, str(run / run_folder.RECIPE))
        options = config.read(LogOptions, self._tables.get("log", {}), "log")
        project = options.project or self._tables.get("run", {}).get("name") or PROJECT
        target = logger.target(run, make_config(self._tables, contents.summary), project)
        self._name, self._tracker = name, logger.make_tracker(target)
        self._run, self._is_logged = run, name in options.names
        self._has_facts = bool(contents.summary)
        self.folder = target.folder / logger.kind
        self._rows: Rows | None = None  # in the tracker; None before it is open

    def update(self, rows: Rows) -> None:
        """Write the rows that are new; a run that was resumed may have other rows than before.

        Raises UsageError while the run's job writes there itself.
        """
        is_own = (self.folder / EXPORTED).exists() or not self.folder.exists()
        if (self._is_logged or not is_own) and is_locked(self._run):
            raise UsageError(f"{self._run}: its job runs, and writes to {self._name} itself")
        pairs = zip(self._rows or [], rows, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self._rows or []))
        with self._readable_faults():
            if self._rows is None or same < len(self._rows):
                self._go_back(rows[:same])
            self._write(rows)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, and the facts of the job that were not known, and close the files."""
        tracker = self._tracker
        with self._readable_faults():
            if not self._has_facts:
                facts = make_config(self._tables, summary)
                tracker.target = replace(tracker.target, config=facts)
                self._go_back(rows := self._rows or [])
                self._write(rows)
            tracker.end(summary)

    def _go_back(self, rows: Rows) -> None:
        """Open the tracker after the last of `rows`."""
        opening.create(self._tracker.folder / EXPORTED, 2).close()
        self._step = self._tracker.begin(rows[-1]["step"] if rows else 0, has_rows=True)

    def _write(self, rows: Rows) -> None:
        for row in rows:
            if row["step"] > self._step:
                self._tracker.log(row["step"], row_values(row))
                self._step = row["step"]
        self._rows = [*rows]

    @contextmanager
    def _readable_faults(self) -> Iterator[None]:
        """Raise UsageError in place of whatever the tracker's library raises."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UsageError(f"{self.folder}: {self._name} cannot be written: {text}") from error


def export(run: Path, name: str) -> Path:
    """Make the files of the tracker `name` from those of a run; return their folder.

    Raises UsageError, also for a run without rows.
    """
    result = Export(run, name)
    if not (rows := run_folder.rows(run)):
        raise UsageError(f"{run}: expected rows in {run_folder.METRICS}, seen none")
    result.update(rows)
    unfinished = {"status": history.RUNNING if is_locked(run) else history.KILLED}
    result.end(run_folder.read_summary(run) or unfinished)
    return result.folder
