"""Results of a campaign: a line of JSON per case, after a line of facts on this machine.

On a terminal a bar, and a line per case; at the end tables and a summary.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hpctrain.core import files, progress
from hpctrain.core.fitted_table import make_table, print_table
from hpctrain.core.printing import say
from hpctrain.tools.chaos import jobs
from hpctrain.tools.chaos.campaign import LINES_LIMIT_BYTES
from hpctrain.tools.chaos.case import Case, Table, describe_case, describe_kind, parse
from hpctrain.tools.chaos.runner import FAILED, PASSED, SKIPPED
from hpctrain.transport import machine

CaseKey = tuple[int, int]  #: seed and index
DEFAULT_WIDTH = 200  #: of tables where there is no terminal
log = logging.getLogger(__name__)


def begin(path: Path) -> None:
    """Write the line of facts, unless the file has one."""
    if not path.exists():
        version = jobs.mpi().version
        facts = {"mpi": f"{jobs.mpi_name()} {version}", "python": sys.version.split()[0],
                 "cpu": machine.cpu(), "cores": os.cpu_count(),
                 "versions": machine.versions()}  # fmt: skip
        append(path, {"campaign": facts})


def append(path: Path, table: Table) -> None:
    """Append one line; raise OSError."""
    files.append_lines(path, json.dumps(table) + "\n")


def read(path: Path) -> dict[CaseKey, Table]:
    """Return the lines of a file of results, the last one of each case."""
    if not path.exists():
        return {}
    tables = files.read_log(path, lambda table: table, LINES_LIMIT_BYTES).entries
    results = [table for table in tables if "case" in table and "verdict" in table]
    return {(table["case"]["seed"], table["case"]["index"]): table for table in results}


def remaining(cases: Iterable[Case], results: dict[CaseKey, Table]) -> list[Case]:
    """Return the cases that have not passed."""
    passed_keys = {key for key, table in results.items() if table["verdict"] == PASSED}
    return [case for case in cases if (case.seed, case.index) not in passed_keys]


def counts(results: Iterable[Table]) -> dict[str, dict[str, Counter[str]]]:
    """Return title -> name -> verdict -> number of cases."""
    totals: dict[str, dict[str, Counter[str]]] = {}
    for result in results:
        launcher, spares = result["case"]["launcher"], result["case"].get("spares")
        keys_by_title = {
            "engine": [f"{result['mpi']} {result['case']['engine']}"],
            "launcher": [f"{result['mpi']} {launcher}" + (f", {spares} spares" if spares else "")],
            "fault": [describe_kind(fault) for fault in parse(result["case"]).faults],
            "broken promise": [problem[:70] for problem in result["problems"]],
        }
        for title, keys in keys_by_title.items():
            for key in keys:
                totals.setdefault(title, {}).setdefault(key, Counter())[result["verdict"]] += 1
    return totals


def summarize(results: list[Table]) -> str:
    """Return the last line of a campaign."""
    verdicts = Counter(result["verdict"] for result in results)
    hit_count = sum(any(item["fired"] for item in result["attempts"]) for result in results)
    fault_count = sum(len(result["case"]["faults"]) for result in results)
    text = (
        f"{len(results)} cases with {fault_count} faults, {hit_count} of them hit, "
        f"{verdicts[FAILED]} failed"
    )
    skipped_count = len(results) - verdicts[FAILED] - verdicts[PASSED]
    return f"{text}, {skipped_count} skipped" if skipped_count else text


def losses(results: Iterable[Table]) -> dict[str, Any]:
    """Return sums over elastic runs: recoveries, and the part of time that made progress."""
    elastic = [result for result in results if "wall_s" in result]
    wall_s = sum(result["wall_s"] for result in elastic)
    lost_s = sum(result.get("lost_s") or 0.0 for result in elastic)
    recoveries = sum(len(result.get("recoveries") or ()) for result in elastic)
    return {"recoveries": recoveries, "ettr": 1 - lost_s / wall_s} if wall_s and recoveries else {}


def make_bar(title: str, total: int) -> Progress:
    """Return a bar of cases, which is drawn on a terminal only."""
    console = progress.console()
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed", markup=False), TimeElapsedColumn(),
        TextColumn("ETA", markup=False), TimeRemainingColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    bar.add_task(title, total=total, failed=0)
    return bar


def show(bar: Progress, result: Table) -> None:
    """Print the line of a case above the bar or in a log, and move the bar on."""
    is_quiet = not log.isEnabledFor(logging.INFO) and result["verdict"] == PASSED
    for line in () if is_quiet else case_lines(result):
        bar.console.print(line, highlight=False, soft_wrap=True)
    (task,) = bar.tasks
    failed_count = task.fields["failed"] + (result["verdict"] == FAILED)
    bar.update(task.id, advance=1, failed=failed_count)


def case_lines(result: Table) -> list[str]:
    """Return one case in words: a line, and one for each broken promise."""
    codes = [item["code"] for item in result["attempts"]]
    case = parse(result["case"])
    line = f"{case.seed}/{case.index} {result['mpi']} {describe_case(case)} -> {codes}"
    line += f" {result['seconds']:.1f} s"
    if result["verdict"] == SKIPPED:
        line += f" skipped: {result['skipped']}"
    return [line, *(f"    FAILED {problem}" for problem in result["problems"])]


def print_cases(cases: Sequence[Case], results: dict[CaseKey, Table]) -> None:
    """Print a line per case with its verdict, if it has one."""
    for case in cases:
        result = results.get((case.seed, case.index))
        verdict = result["verdict"] if result else "not run"
        say(f"{verdict:8} {case.seed}/{case.index} {describe_case(case)}")


def print_summary(tables: list[Table]) -> None:
    """Print tables of verdicts by engine, launcher, fault and broken promise, then the sums."""
    for title, rows in counts(tables).items():
        headings = (title, PASSED, FAILED, SKIPPED)
        cells = (
            (name, *(str(verdicts[verdict]) for verdict in headings[1:]))
            for name, verdicts in sorted(rows.items())
        )
        print_table(make_table(headings, cells, *headings), DEFAULT_WIDTH)
    unchecked_counts = Counter(text for table in tables for text in table.get("unchecked", ()))
    for text, number in unchecked_counts.items():
        say(f"not checked in {number} cases: {text}")
    if totals := losses(tables):
        say(f"{totals['recoveries']} recoveries, {100 * totals['ettr']:.1f} % of time in progress")
    say(summarize(tables))
