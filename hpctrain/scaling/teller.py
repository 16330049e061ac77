"""What people see while a study runs: a bar on a terminal, a plain line per trial in a log."""

from __future__ import annotations

import logging
from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpctrain import progress
from hpctrain.scaling.collect import Gap, Trial

log = logging.getLogger(__name__)


class Teller:
    """The voice of a study of `total` trials; a context manager."""

    def __init__(self, title: str, total: int):
        console = progress.console()
        shown = log.isEnabledFor(logging.INFO)
        self._bar = Progress(
            TextColumn(escape(title)),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
            auto_refresh=False,  # a thread that draws would take a core from those who compute
        )
        self._news = ""
        self._task = self._bar.add_task("", total=total, what="")

    def __enter__(self) -> Teller:
        """Return self."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar as it is."""
        self._bar.stop()

    def expect(self, total: int) -> None:
        """Let the bar have room for `total` trials."""
        self._bar.update(self._task, total=total, refresh=True)

    def begin(self, what: str) -> None:
        """Say what runs now."""
        self._bar.update(self._task, what=what, refresh=True)

    def news(self, what: str) -> None:
        """Say how things stand while nothing ends; in a log once, until that changes."""
        if self._bar.disable and what != self._news:
            self.say(logging.INFO, what)
        self._news = what
        self.begin(what)

    def end(self, what: str, found: Trial | Gap) -> None:
        """Say what became of a trial."""
        self._bar.update(self._task, advance=1, refresh=True)
        if isinstance(found, Gap):
            self.say(logging.WARNING, f"{what}: {found.reason}")
        elif self._bar.disable:
            self.say(logging.INFO, f"{what}: {found.samples_per_s:,.0f} samples/s")

    def say(self, level: int, text: str) -> None:
        """Log a line; above the bar where there is one."""
        if self._bar.disable:
            log.log(level, text)
        else:
            self._bar.console.print(escape(text))
