"""Print the result of the doctor: the topology of the node, the table of checks, the remedies."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.doctor.check import Check
from hpctrain.doctor.examine import NodeResult

COLOURS = {"ok": "green", "note": "cyan", "slow": "yellow", "bad": "bold red"}
WIDTH = 110  # where there is no terminal


def show(result: NodeResult, console: Console) -> None:
    """Print the topology, the table, then the remedies, a line each that can be copied."""
    for line in result.hardware.lines:
        console.print(Text(line), soft_wrap=True)
    console.print(table(result.checks))
    remedies(result.checks, console)


def remedies(checks: Sequence[Check], console: Console) -> None:
    """Print the remedies, a line each."""
    for check in checks:
        if check.remedy and check.verdict in ("slow", "bad"):
            console.print(Text(f"{check.name}: {check.remedy}"), soft_wrap=True)


def table(checks: Sequence[Check]) -> Table:
    """Return a row per check."""
    grid = Table("check", "verdict", "seen", "remedy")
    for check in checks:
        verdict = Text(check.verdict, COLOURS[check.verdict])
        grid.add_row(check.name, verdict, Text(check.seen), Text(check.remedy))
    return grid


def console() -> Console:
    """Return a console on stdout, wide enough for the table if it is no terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=WIDTH)
