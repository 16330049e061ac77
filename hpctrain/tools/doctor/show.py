"""Print the result of the doctor: the topology of the node, the table of checks, the remedies.

Of a job: the topologies, the binding map, a row per check, the remedies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from hpctrain.core import progress
from hpctrain.core.fitted_table import PlainConsole, fit_table, make_table
from hpctrain.core.printing import say
from hpctrain.tools.doctor.check import Check, node_list
from hpctrain.tools.doctor.examine import NodeResult
from hpctrain.tools.doctor.job import binding
from hpctrain.tools.doctor.job.result import JobResult

VERDICT_COLOURS = {"ok": "green", "note": "cyan", "slow": "yellow", "bad": "bold red"}
DEFAULT_WIDTH = 110  # characters, if stdout is no terminal
MAX_SHOWN_RANKS = 64  # in the binding map; --json has all ranks


def print_result(result: NodeResult, console: PlainConsole) -> None:
    """Print the topology, the table of checks, and the remedies on lines that users can copy."""
    for line in result.hardware.topology_lines:
        console.print(Text(line), soft_wrap=True)
    print_checks(result.checks, console)


def print_checks(checks: Sequence[Check], console: PlainConsole) -> None:
    """Print the table of checks, one line per remedy, and the verdict."""
    console.print(fit_table(checks_table(checks), console))
    for check in checks:
        if check.remedy and check.verdict in ("slow", "bad"):
            console.print(Text(f"{check.name}: {check.remedy}"), soft_wrap=True)
    names_by_verdict = {
        v: [check.name for check in checks if check.verdict == v] for v in ("bad", "slow")
    }
    faults_text = "; ".join(
        f"{verdict}: {', '.join(names)}" for verdict, names in names_by_verdict.items() if names
    )
    console.print(Text(faults_text or "no fault: runs can start here"), soft_wrap=True)


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


class StageLine:
    """The line that names the current stage: a terminal overwrites it, a log keeps all lines."""

    def __init__(self, is_visible: bool):
        terminal = progress.console()
        self._is_visible = is_visible
        self._is_terminal = terminal.is_terminal and not terminal.is_dumb_terminal
        self._start_s = time.monotonic()

    def show_stage(self, text: str) -> None:
        """Show the stage that begins now."""
        if self._is_visible:
            self.erase()
            line = f"doctor: {time.monotonic() - self._start_s:4.1f} s  {text}"
            say(line, end="" if self._is_terminal else "\n", err=True)

    def erase(self) -> None:
        """Erase the line on a terminal."""
        if self._is_visible and self._is_terminal:
            say(end="\r\x1b[K", err=True)


def print_job(result: JobResult) -> None:
    """Print the result of a job on stdout, wide enough for the tables if stdout is no terminal."""
    console = progress.stdout_console(DEFAULT_WIDTH)
    lines_by_host = {host: facts.topology_lines for host, facts in result.nodes.items()}
    for line in format_topologies(lines_by_host):
        console.print(Text(line), soft_wrap=True)
    if result.binding_map:
        console.print(fit_table(binding_table(result.binding_map), console))
    print_checks(result.checks, console)
    if result.excluded_nodes:
        console.print(
            Text(f"slow or broken nodes: --exclude={result.excluded_nodes}"), soft_wrap=True
        )


def format_topologies(lines_by_host: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the nodes' topologies as text; equal topologies appear once."""
    hosts_by_lines: dict[tuple[str, ...], list[str]] = {}
    for host, lines in lines_by_host.items():
        hosts_by_lines.setdefault(tuple(lines[1:]), []).append(host)
    return [
        line
        for lines, hosts in hosts_by_lines.items()
        for line in (f"node {node_list(hosts)}", *lines)
    ]


def binding_table(rows: Sequence[tuple[str, ...]]) -> Table:
    """Return the binding map as a table; with many ranks, equally bound nodes appear once."""
    notes: list[str] = []
    if len(rows) > MAX_SHOWN_RANKS:
        rows, notes = _example_nodes(rows)
    if len(rows) > MAX_SHOWN_RANKS:
        notes.append(f"and {len(rows) - MAX_SHOWN_RANKS} ranks more")
    caption = f"{'; '.join(notes)}: --json" if notes else None
    headings = binding.COLUMNS
    return make_table(headings, rows[:MAX_SHOWN_RANKS], *headings, caption=caption)


def _example_nodes(rows: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a node's rows per kind of binding, and notes on the nodes bound equally."""
    rows_by_host: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        rows_by_host.setdefault(row[1], []).append(row)
    hosts_by_lines: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for host, node_rows in rows_by_host.items():
        hosts_by_lines.setdefault(tuple(row[2:] for row in node_rows), []).append(host)
    example_rows = [
        row for first_host, *_ in hosts_by_lines.values() for row in rows_by_host[first_host]
    ]
    return example_rows, [
        f"{node_list(other_hosts)} are bound as {first_host}"
        for first_host, *other_hosts in hosts_by_lines.values()
        if other_hosts
    ]
