"""Output of a campaign: a bar on a terminal, a line per case, tables and a summary at the end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable

from hpctrain.core import progress
from hpctrain.core.fitted_table import print_table
from hpctrain.core.printing import say
from hpctrain.tools.chaos import results
from hpctrain.tools.chaos.case import Case, Table, parse
from hpctrain.tools.chaos.describe import describe_case
from hpctrain.tools.chaos.runner import FAILED, PASSED, SKIPPED

DEFAULT_WIDTH = 200  #: of tables where there is no terminal
log = logging.getLogger(__name__)


class CaseBar:
    """A bar of cases on a terminal, and a line per case above it or in a log."""

    def __init__(self, title: str, total: int):
        console = progress.console()
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed", markup=False), TimeElapsedColumn(),
            TextColumn("ETA", markup=False), TimeRemainingColumn(),
        )  # fmt: skip
        self._is_shown = console.is_terminal
        self._progress = Progress(*columns, console=console, disable=not self._is_shown)
        self._task = self._progress.add_task(title, total=total, failed=0)
        self._failed = 0

    def __enter__(self) -> CaseBar:
        """Draw the bar."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is."""
        self._progress.stop()

    def show(self, result: Table) -> None:
        """Print the line of a case, and move the bar on."""
        self._failed += result["verdict"] == FAILED
        is_quiet = not log.isEnabledFor(logging.INFO) and result["verdict"] == PASSED
        for line in () if is_quiet else case_lines(result):
            self._progress.console.print(line, highlight=False, soft_wrap=True)
        self._progress.update(self._task, advance=1, failed=self._failed)


def case_lines(result: Table) -> list[str]:
    """Return one case in words: a line, and one for each broken promise."""
    codes = [item["code"] for item in result["attempts"]]
    case = parse(result["case"])
    line = f"{case.seed}/{case.index} {result['mpi']} {describe_case(case)} -> {codes}"
    line += f" {result['seconds']:.1f} s"
    if result["verdict"] == SKIPPED:
        line += f" skipped: {result['skipped']}"
    return [line, *(f"    FAILED {problem}" for problem in result["problems"])]


def print_cases(cases: Sequence[Case], found: dict[results.CaseKey, Table]) -> None:
    """Print a line per case with its verdict, if it has one."""
    for case in cases:
        result = found.get((case.seed, case.index))
        verdict = result["verdict"] if result else "not run"
        say(f"{verdict:8} {case.seed}/{case.index} {describe_case(case)}")


def print_summary(tables: list[Table]) -> None:
    """Print tables of verdicts by engine, launcher, fault and broken promise, then the sums."""
    for title, rows in results.counts(tables).items():
        table = RichTable(title, "passed", "failed", "skipped", title_justify="left")
        for name, verdicts in sorted(rows.items()):
            table.add_row(name, *(str(verdicts[word]) for word in (PASSED, FAILED, SKIPPED)))
        print_table(table, DEFAULT_WIDTH)
    for text, number in results.unchecked(tables).items():
        say(f"not checked in {number} cases: {text}")
    if sums := results.losses(tables):
        say(f"{sums['recoveries']} recoveries, {100 * sums['ettr']:.1f} % of time in progress")
    say(results.summarize(tables))
