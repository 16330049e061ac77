"""The result of a job's preflight so far; complete on rank 0 alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.doctor.check import Check, exit_code
from hpctrain.doctor.job import binding
from hpctrain.doctor.job.cores import Core
from hpctrain.doctor.job.hosts import listed
from hpctrain.doctor.job.ping_pong import Ping
from hpctrain.doctor.job.rank_facts import RankFacts
from hpctrain.transport.placement.check import RankBinding


@dataclass
class JobResult:
    """Placement, facts, measurements and checks of the job; each stage adds its own."""

    hosts: tuple[str, ...] = ()
    seats: tuple[RankBinding, ...] = ()
    told: list[RankFacts] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)
    pings: list[Ping] = field(default_factory=list)

    @property
    def map(self) -> list[tuple[str, ...]]:
        """The rows of the binding map, under seats.COLUMNS."""
        return binding.rows(self.seats)

    @property
    def nodes(self) -> dict[str, RankFacts]:
        """The facts of each node's first rank."""
        return {host: self.told[self.hosts.index(host)] for host in self.hosts if self.told}

    @property
    def exclude(self) -> str:
        """The nodes to leave out, as srun takes them; "" for none, or if no node would remain."""
        blamed = dict.fromkeys(node for check in self.checks for node in check.nodes)
        return "" if blamed.keys() >= set(self.hosts) else listed(blamed)

    def table(self) -> dict[str, Any]:
        """Return the table that --json writes."""
        return {
            "exit_code": exit_code(self.checks),
            "exclude": self.exclude,
            "checks": [asdict(check) for check in self.checks],
            "ranks": [dict(zip(binding.COLUMNS, row, strict=True)) for row in self.map],
            "versions": [facts.versions for facts in self.told],
            "nodes": {host: facts.hardware for host, facts in self.nodes.items()},
            "cores": [asdict(core) for core in self.cores],
            "pings": [asdict(ping) for ping in self.pings],
        }
