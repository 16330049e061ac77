"""The progress display of a study: a table on a terminal, a plain line per change in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType

from rich.live import Live

from hpctrain.core import progress
from hpctrain.core.fitted_table import fit_table
from hpctrain.tools.scaling.output import live_table, tables
from hpctrain.tools.scaling.output.live_table import MEASURED, TrialStatus
from hpctrain.tools.scaling.study import Study, TrialKey

log = logging.getLogger(__name__)


class LiveView:
    """The progress display of a study; a context manager that holds the status of each trial."""

    def __init__(self, study: Study):
        self.study = study
        self._statuses: dict[TrialKey, TrialStatus] = dict.fromkeys(study.trials, TrialStatus())
        self._activity, self._start_s, self._end_count = "", 0.0, 0
        console = progress.console()
        can_redraw = console.is_terminal and not console.is_dumb_terminal
        self.is_drawn = log.isEnabledFor(logging.INFO) and can_redraw
        # No thread that draws: it would take a core from the ranks.
        self._live = Live(console=console, auto_refresh=False) if self.is_drawn else None

    def __enter__(self) -> LiveView:
        """Return self; the table appears with the first change."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the table on screen if the study was stopped; else the table of results follows."""
        if self._live:
            self._live.transient = kind is None
            self._live.stop()

    def set_study(self, study: Study, statuses: Mapping[TrialKey, TrialStatus]) -> None:
        """Take the final study, and the statuses of its trials so far."""
        self.study, self._statuses, self._start_s = study, dict(statuses), time.monotonic()
        self._draw()

    def show_activity(self, activity: str) -> None:
        """Show a current activity other than a trial."""
        self._activity = activity
        if self._live:
            self._draw()
        else:
            log.info(activity)

    def update(self, changed: Mapping[TrialKey, TrialStatus]) -> None:
        """Show the new statuses of some trials; in a log only the changes."""
        previous, self._statuses = self._statuses, {**self._statuses, **changed}
        self._activity = ""
        self._end_count += len(_final_keys(self._statuses) - _final_keys(previous))
        if self._live:
            self._draw()
            return
        for level, text in live_table.change_lines(self.study, previous, self._statuses):
            log.log(level, text)

    def log_line(self, level: int, text: str) -> None:
        """Log a line; above the table where there is one."""
        if self._live:
            self._live.console.print(text)
        else:
            log.log(level, text)

    def _draw(self) -> None:
        if self._live:
            title = tables.title(self.study)
            live_rows = live_table.table(self.study, self._statuses, title, self._note())
            self._live.start()  # for the first time
            self._live.update(fit_table(live_rows, self._live.console), refresh=True)

    def _note(self) -> str:
        """Return the current activity other than a trial; else the time left for trials."""
        remaining = len(self._statuses) - len(_final_keys(self._statuses))
        if self._activity or not (remaining and self._end_count) or self.study.on == "slurm":
            return self._activity
        trial_s = (time.monotonic() - self._start_s) / self._end_count
        return f"about {max(1, round(trial_s * remaining / 60))} min left" if remaining else ""


def _final_keys(statuses: Mapping[TrialKey, TrialStatus]) -> set[TrialKey]:
    return {
        key for key, status in statuses.items() if status.state in (MEASURED, live_table.FAILED)
    }
