"""The files of a run that one rank writes: rows, buffered after a failed write, and the summary."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.core import files
from hpctrain.core.run_files import run_folder

log = logging.getLogger(__name__)
Row = dict[str, Any]


class RunFiles:
    """The files in folder `run`; None for a rank that writes none, and a run without a folder."""

    def __init__(self, run: Path | None):
        self.run = run
        self.pending: list[Row] = []  #: rows that could not be written yet; a checkpoint keeps them

    def go_back(self, step: int, about: Mapping[str, Any]) -> tuple[list[Row], Row | None, int]:
        """Drop the rows after `step`; return those before it, the summary and the steps done again.

        `about`: the facts of the checkpoint of that step. Raises UsageError.
        """
        if self.run is None:
            return [], None, 0
        summary = run_folder.read_summary(self.run)
        with run_folder.writable(self.run):
            redone = run_folder.go_back(self.run, step, about.get("steps_redone", 0))
            return run_folder.add_missing(self.run, about.get("rows_due", [])), summary, redone

    def begin(self, recipe: str | None) -> None:
        """Write the recipe; raise UsageError, and leave the old summary, if that fails."""
        if self.run is None:
            return
        with run_folder.writable(self.run):
            if recipe is not None:
                run_folder.write_recipe(self.run, recipe)
            run_folder.begin(self.run)

    def add(self, row: Row) -> None:
        """Write a row after the pending ones; if that fails, training goes on."""
        if self.run is None:
            return
        self.pending = [*self.pending, row]
        try:
            run_folder.append_row(self.run, *self.pending)
            self.pending = []
        except OSError as error:  # as where a checkpoint cannot be saved, training goes on
            place = f"{run_folder.METRICS} of {self.run}"
            log.warning("%s is not written (%s); training goes on", place, error.strerror)

    def sync(self) -> None:
        """Write the rows through to the disk before a checkpoint that counts on them."""
        if self.run is None:
            return
        metrics_path = self.run / run_folder.METRICS
        try:
            files.sync(metrics_path)
        except FileNotFoundError:
            return  # no row was due yet
        except OSError as error:  # training goes on
            log.warning("%s may lose rows: %s", metrics_path, error.strerror)

    def end(self, summary: Row) -> str:
        """Write the pending rows, then the summary; return the fault, '' for none.

        A run that lacks rows is not done: then no summary "done" is written.
        """
        if self.run is None:
            return ""
        fault = ""
        try:
            if self.pending:
                run_folder.append_row(self.run, *self.pending)
            self.pending = []
        except OSError as error:
            steps = ", ".join(str(row["step"]) for row in self.pending)
            fault = (
                f"{self.run / run_folder.METRICS} lacks the rows of steps {steps}: "
                f"{error.strerror}. The last checkpoint has them: make room, go on with --resume "
                "(in Python resume=True)"
            )
        if fault and summary["status"] == "done":
            return fault
        try:
            run_folder.write_summary(self.run, summary)
        except OSError as error:
            return f"{self.run / run_folder.SUMMARY} cannot be written: {error.strerror}"
        return fault
