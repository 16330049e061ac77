"""The output of a job's preflight: topologies, the binding map, a row per check, remedies."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.core import progress
from hpctrain.doctor.check import node_list
from hpctrain.doctor.job import binding
from hpctrain.doctor.job.result import JobResult
from hpctrain.doctor.show import WIDTH, remedies, table

MOST_RANKS = 64  # in the map; --json has all


class StageLine:
    """The line of the current stage: overwritten on a terminal, one after the other in a log."""

    def __init__(self, visible: bool):
        self._visible, self._terminal = visible, progress.console().is_terminal
        self._start_s = time.monotonic()

    def say(self, text: str) -> None:
        """Show the stage that begins now."""
        if self._visible:
            line = f"doctor: {time.monotonic() - self._start_s:4.1f} s  {text}"
            start, stop = ("\r\x1b[K", "") if self._terminal else ("", "\n")
            print(f"{start}{line}", end=stop, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Erase the line on a terminal."""
        if self._visible and self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def show(result: JobResult) -> None:
    """Print the result on stdout, wide enough for the tables where it is no terminal."""
    terminal = progress.console()  # under mpirun stdout may look like a terminal though it is not
    drawn, width = terminal.is_terminal, terminal.width if terminal.is_terminal else WIDTH
    console = Console(file=sys.stdout, force_terminal=drawn, width=width)
    for line in topology_lines({host: facts.lines for host, facts in result.nodes.items()}):
        console.print(Text(line), soft_wrap=True)
    if result.map:
        console.print(binding_map(result.map))
    console.print(table(result.checks))
    remedies(result.checks, console)
    if result.exclude:
        console.print(Text(f"slow or broken nodes: --exclude={result.exclude}"), soft_wrap=True)


def topology_lines(lines: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the topologies of all nodes as text; equal ones once."""
    ranks_by_binding: dict[tuple[str, ...], list[str]] = {}
    for host, drawn in lines.items():
        ranks_by_binding.setdefault(tuple(drawn[1:]), []).append(host)
    return [
        line
        for drawn, hosts in ranks_by_binding.items()
        for line in (f"node {node_list(hosts)}", *drawn)
    ]


def binding_map(rows: Sequence[tuple[str, ...]]) -> Table:
    """Return the map as a table; for many ranks one node of each kind."""
    drawn = Table(*binding.COLUMNS)
    words: list[str] = []
    if len(rows) > MOST_RANKS:
        rows, words = _kinds(rows)
    for row in rows[:MOST_RANKS]:
        drawn.add_row(*map(Text, row))
    if len(rows) > MOST_RANKS:
        words.append(f"and {len(rows) - MOST_RANKS} ranks more")
    drawn.caption = f"{'; '.join(words)}: --json" if words else None
    return drawn


def _kinds(rows: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the rows of one node of each kind, and a text for the nodes equal to it."""
    of_hosts: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        of_hosts.setdefault(row[1], []).append(row)
    hosts_by_kind: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for host, node_rows in of_hosts.items():
        hosts_by_kind.setdefault(tuple(row[2:] for row in node_rows), []).append(host)
    examples = [row for first, *_ in hosts_by_kind.values() for row in of_hosts[first]]
    return examples, [
        f"{node_list(rest)} are bound as {first}" for first, *rest in hosts_by_kind.values() if rest
    ]
