"""Print the result of the doctor: the topology of the node, the table of checks, the remedies."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from hpctrain.core.fitted_table import PlainConsole, fit_table, stdout_console
from hpctrain.tools.doctor.check import Check
from hpctrain.tools.doctor.examine import NodeResult
from hpctrain.tools.show.tables import make_table

VERDICT_COLOURS = {"ok": "green", "note": "cyan", "slow": "yellow", "bad": "bold red"}
DEFAULT_WIDTH = 110  # characters, if stdout is no terminal


def print_result(result: NodeResult, console: PlainConsole) -> None:
    """Print the topology, the table of checks, and the remedies on lines that users can copy."""
    for line in result.hardware.topology_lines:
        console.print(Text(line), soft_wrap=True)
    console.print(fit_table(checks_table(result.checks), console))
    print_remedies(result.checks, console)


def print_remedies(checks: Sequence[Check], console: PlainConsole) -> None:
    """Print one line per remedy, and the verdict of the checks."""
    for check in checks:
        if check.remedy and check.verdict in ("slow", "bad"):
            console.print(Text(f"{check.name}: {check.remedy}"), soft_wrap=True)
    names = {v: [check.name for check in checks if check.verdict == v] for v in ("bad", "slow")}
    faults = "; ".join(
        f"{verdict}: {', '.join(listed)}" for verdict, listed in names.items() if listed
    )
    console.print(Text(faults or "no fault: runs can start here"), soft_wrap=True)


def checks_table(checks: Sequence[Check]) -> Table:
    """Return a table with a row per check."""
    headings = ("check", "verdict", "seen", "remedy")
    rows = (
        (
            check.name,
            Text(check.verdict, VERDICT_COLOURS[check.verdict]),
            Text(check.seen),
            Text(check.remedy),
        )
        for check in checks
    )
    return make_table(headings, rows, *headings)


def make_console() -> PlainConsole:
    """Return a console on stdout, wide enough for the table if stdout is no terminal."""
    return stdout_console(DEFAULT_WIDTH)
