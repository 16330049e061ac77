"""What people see while a study runs: a table on a terminal, a plain line per change in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import TracebackType

from rich.live import Live
from rich.markup import escape

from hpctrain import progress
from hpctrain.scaling import board, show
from hpctrain.scaling.board import MEASURED, Standing
from hpctrain.scaling.study import Key, Study

log = logging.getLogger(__name__)


class Teller:
    """The voice of a study; a context manager that keeps how each of its trials stands."""

    def __init__(self, study: Study):
        self.study = study
        self._board: dict[Key, Standing] = dict.fromkeys(study.trials, Standing())
        self._now, self._began, self._ended = "", 0.0, 0
        console = progress.console()
        self.drawn = log.isEnabledFor(logging.INFO) and console.is_terminal
        # No thread that draws: it would take a core from those who compute.
        self._live = Live(console=console, auto_refresh=False) if self.drawn else None

    def __enter__(self) -> Teller:
        """Return self; what is drawn begins with the first news."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the table where the study was stopped; else the one of its results follows."""
        if self._live:
            self._live.transient = kind is None
            self._live.stop()

    def expect(self, study: Study, standings: Mapping[Key, Standing]) -> None:
        """Take the study as it is known now, and what is there of it already."""
        self.study, self._board, self._began = study, dict(standings), time.monotonic()
        self._draw()

    def begin(self, what: str) -> None:
        """Say what runs now, where it is no trial."""
        self._now = what
        if self._live:
            self._draw()
        else:
            log.info(what)

    def update(self, changed: Mapping[Key, Standing]) -> None:
        """Show how some trials stand now; in a log what is new about them."""
        before, self._board = self._board, {**self._board, **changed}
        self._now = ""
        self._ended += len(_ended(self._board) - _ended(before))
        if self._live:
            self._draw()
            return
        for level, text in board.news(self.study, before, self._board):
            log.log(level, text)

    def say(self, level: int, text: str) -> None:
        """Log a line; above the table where there is one."""
        if self._live:
            self._live.console.print(escape(text))
        else:
            log.log(level, text)

    def _draw(self) -> None:
        if self._live:
            title = show.title(self.study)
            drawn = board.table(self.study, self._board, title, self._note())
            self._live.start()  # for the first time
            self._live.update(drawn, refresh=True)

    def _note(self) -> str:
        """Return what runs where no trial does; else how long trials will take that follow."""
        left = len(self._board) - len(_ended(self._board))
        if self._now or not (left and self._ended) or self.study.on == "slurm":
            return self._now
        each = (time.monotonic() - self._began) / self._ended
        return f"about {max(1, round(each * left / 60))} min left" if left else ""


def _ended(standings: Mapping[Key, Standing]) -> set[Key]:
    return {key for key, one in standings.items() if one.state in (MEASURED, board.FAILED)}
