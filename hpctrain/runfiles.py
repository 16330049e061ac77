"""The files of a run that one rank writes: rows that wait for room, the summary last of all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain import rundir

log = logging.getLogger(__name__)
Row = dict[str, Any]


class RunFiles:
    """The files in folder `run`; None for a rank that writes none, and a run that keeps none."""

    def __init__(self, run: Path | None):
        self.run = run
        self.due: list[Row] = []  #: rows that could not be written yet; a checkpoint keeps them
        self.steps_redone = 0

    def go_back(self, step: int, about: Mapping[str, Any]) -> tuple[list[Row], Row | None]:
        """Drop the rows after `step`; return those before it, and the summary if there is one.

        `about`: what the checkpoint of that step tells. Raises UsageError.
        """
        if self.run is None:
            return [], None
        summary = rundir.read_summary(self.run)
        with rundir.writable(self.run):
            self.steps_redone = rundir.go_back(self.run, step, about.get("steps_redone", 0))
            return rundir.add_missing(self.run, about.get("rows_due", [])), summary

    def begin(self, recipe: str | None) -> None:
        """Write what the run is; raise UsageError, and leave the summary, where that fails."""
        if self.run is None:
            return
        with rundir.writable(self.run):
            if recipe is not None:
                rundir.write_recipe(self.run, recipe)
            rundir.begin(self.run)

    def add(self, row: Row) -> None:
        """Write a row, and those before it that are due; where that fails, training goes on."""
        if self.run is not None:
            self.due = rundir.appended(self.run, [*self.due, row])

    def sync(self) -> None:
        """Write the rows through to the disk: no checkpoint is to tell of rows that are lost."""
        if self.run is not None:
            rundir.sync_rows(self.run)

    def end(self, summary: Row) -> str:
        """Write the rows that are due, then the summary; return what could not be written.

        A run that lacks rows is not done: then there is no summary that says so.
        """
        if self.run is None:
            return ""
        fault = self._write_due()
        if fault and summary["status"] == "done":
            return fault
        try:
            rundir.write_summary(self.run, summary)
        except OSError as error:
            return f"{self.run / rundir.SUMMARY} cannot be written: {error.strerror}"
        return fault

    def _write_due(self) -> str:
        assert self.run is not None
        try:
            if self.due:
                rundir.append_row(self.run, *self.due)
        except OSError as error:
            steps = ", ".join(str(row["step"]) for row in self.due)
            return (
                f"{self.run / rundir.METRICS} lacks the rows of steps {steps}: {error.strerror}. "
                "The last checkpoint has them: make room, and go on with --resume"
            )
        self.due = []
        return ""
