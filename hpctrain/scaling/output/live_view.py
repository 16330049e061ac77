"""The progress display of a study: a table on a terminal, a plain line per change in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType

from rich.live import Live
from rich.markup import escape

from hpctrain.core import progress
from hpctrain.scaling.output import live_table, tables
from hpctrain.scaling.output.live_table import MEASURED, Standing
from hpctrain.scaling.study import Key, Study

log = logging.getLogger(__name__)


class Teller:
    """The progress display of a study; a context manager that holds the standing of each trial."""

    def __init__(self, study: Study):
        self.study = study
        self._board: dict[Key, Standing] = dict.fromkeys(study.trials, Standing())
        self._now, self._began, self._ended = "", 0.0, 0
        console = progress.console()
        self.drawn = log.isEnabledFor(logging.INFO) and console.is_terminal
        # No thread that draws: it would take a core from the ranks.
        self._live = Live(console=console, auto_refresh=False) if self.drawn else None

    def __enter__(self) -> Teller:
        """Return self; the table appears with the first change."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the table on screen if the study was stopped; else that of its results follows."""
        if self._live:
            self._live.transient = kind is None
            self._live.stop()

    def expect(self, study: Study, standings: Mapping[Key, Standing]) -> None:
        """Take the final study, and the standings of its trials so far."""
        self.study, self._board, self._began = study, dict(standings), time.monotonic()
        self._draw()

    def begin(self, activity: str) -> None:
        """Show a current activity other than a trial."""
        self._now = activity
        if self._live:
            self._draw()
        else:
            log.info(activity)

    def update(self, changed: Mapping[Key, Standing]) -> None:
        """Show the new standings of some trials; in a log only the changes."""
        before, self._board = self._board, {**self._board, **changed}
        self._now = ""
        self._ended += len(_ended(self._board) - _ended(before))
        if self._live:
            self._draw()
            return
        for level, text in live_table.news(self.study, before, self._board):
            log.log(level, text)

    def say(self, level: int, text: str) -> None:
        """Log a line; above the table where there is one."""
        if self._live:
            self._live.console.print(escape(text))
        else:
            log.log(level, text)

    def _draw(self) -> None:
        if self._live:
            title = tables.title(self.study)
            drawn = live_table.table(self.study, self._board, title, self._note())
            self._live.start()  # for the first time
            self._live.update(drawn, refresh=True)

    def _note(self) -> str:
        """Return the current activity other than a trial; else the time left for trials."""
        left = len(self._board) - len(_ended(self._board))
        if self._now or not (left and self._ended) or self.study.on == "slurm":
            return self._now
        per_trial = (time.monotonic() - self._began) / self._ended
        return f"about {max(1, round(per_trial * left / 60))} min left" if left else ""


def _ended(standings: Mapping[Key, Standing]) -> set[Key]:
    return {
        key
        for key, standing in standings.items()
        if standing.state in (MEASURED, live_table.FAILED)
    }
