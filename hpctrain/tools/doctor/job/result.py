"""The result of a job's preflight, gathered on rank 0; a rank without an answer ends the job.

Rank 0 receives the answers one by one, so that its record in the watch names the rank it waits for.
If all nodes share a folder, each rank keeps its record in it, and the report names the silent ranks
and the ranks that wait for them. Rank 0 then prints the result so far and aborts the job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.tools.doctor.check import Check, exit_code, node_list
from hpctrain.tools.doctor.job import binding
from hpctrain.tools.doctor.job.consistency import RankFacts
from hpctrain.tools.doctor.job.cores import CoreTiming
from hpctrain.tools.doctor.job.ping_pong import Ping
from hpctrain.transport import abort
from hpctrain.transport.link import Link
from hpctrain.transport.placement.check import RankBinding
from hpctrain.watch import HungReport, Watch, write_report
from hpctrain.world import World, watched

RANK_0_HEAD_START_S = 3.0  # so that rank 0 reports what all ranks see before they do
PrintReport = Callable[[str], None]  #: prints a report of a hang, on rank 0


def gather_json(link: Link, answer: Any) -> list[Any]:
    """Return the JSON-serializable `answer` of every rank on rank 0; [] on the other ranks."""
    payload = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    if link.rank:
        link.isend(np.array([payload.size]), 0).wait()
        link.isend(payload, 0).wait()
        return []
    return [answer, *(_receive_json(link, rank) for rank in range(1, link.size))]


def _receive_json(link: Link, rank: int) -> Any:
    size = np.empty(1, np.int64)
    link.irecv(size, rank).wait()
    payload = np.empty(int(size[0]), np.uint8)
    link.irecv(payload, rank).wait()
    return json.loads(payload.tobytes())


@contextmanager
def watch_job(
    world: World, folder: Path | None, limit_s: float, print_report: PrintReport
) -> Iterator[None]:
    """End the job if a rank keeps others waiting; collective.

    The report names this rank if `folder` is shared by all nodes.
    """
    on_hang = partial(_report_hang, world.rank, folder, print_report)
    with ExitStack() as stack:
        try:
            if folder is None:
                raise UsageError("no folder that all ranks share")
            stack.enter_context(watched(world, folder, limit_s, on_hang))
        except UsageError:
            assert world.threads.record is not None
            watch = Watch(world.threads.record, None, limit_s, on_hang, first_step_factor=1)
            stack.callback(watch.stop)
        yield


def _report_hang(
    rank: int, folder: Path | None, print_report: PrintReport, report: HungReport
) -> None:
    try:
        if rank == 0:
            print_report(report.text)
        else:
            time.sleep(RANK_0_HEAD_START_S)
            if folder is None or write_report(folder / "watch", report):
                say(report.text, err=True)
    finally:
        abort.abort(1)


@dataclass
class JobResult:
    """Placement, facts, measurements and checks of the job; each stage adds its results."""

    hosts: tuple[str, ...] = ()
    bindings: tuple[RankBinding, ...] = ()
    facts: list[RankFacts] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    cores: list[CoreTiming] = field(default_factory=list)
    pings: list[Ping] = field(default_factory=list)

    @property
    def binding_map(self) -> list[tuple[str, ...]]:
        """The rows of the binding map, under binding.COLUMNS."""
        return binding.binding_rows(self.bindings)

    @property
    def nodes(self) -> dict[str, RankFacts]:
        """The facts of each node's first rank."""
        return {host: self.facts[self.hosts.index(host)] for host in self.hosts if self.facts}

    @property
    def excluded_nodes(self) -> str:
        """The nodes to leave out, in srun's notation; "" for none, or if no node would remain."""
        blamed_nodes = dict.fromkeys(node for check in self.checks for node in check.nodes)
        return "" if blamed_nodes.keys() >= set(self.hosts) else node_list(blamed_nodes)

    def table(self) -> dict[str, Any]:
        """Return the table that --json writes."""
        return {
            "exit_code": exit_code(self.checks),
            "exclude": self.excluded_nodes,
            "checks": [asdict(check) for check in self.checks],
            "ranks": [dict(zip(binding.COLUMNS, row, strict=True)) for row in self.binding_map],
            "versions": [rank_facts.versions for rank_facts in self.facts],
            "nodes": {host: node.hardware for host, node in self.nodes.items()},
            "cores": [asdict(core) for core in self.cores],
            "pings": [asdict(ping) for ping in self.pings],
        }
