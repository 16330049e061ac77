"""What the preflight of a job has found so far; whole on rank 0 alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.doctor.check import Check, exit_code
from hpctrain.doctor.job import seats
from hpctrain.doctor.job.cores import Core
from hpctrain.doctor.job.hosts import listed
from hpctrain.doctor.job.pings import Ping
from hpctrain.doctor.job.told import Told
from hpctrain.transport.seats import Seated


@dataclass
class Found:
    """The job, and what is known of it; it grows from stage to stage."""

    hosts: tuple[str, ...] = ()
    seats: tuple[Seated, ...] = ()
    told: list[Told] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    cores: list[Core] = field(default_factory=list)
    pings: list[Ping] = field(default_factory=list)

    @property
    def map(self) -> list[tuple[str, ...]]:
        """The rows of the binding map, under seats.COLUMNS."""
        return seats.rows(self.seats)

    @property
    def nodes(self) -> dict[str, Told]:
        """What each node's first rank has told."""
        return {host: self.told[self.hosts.index(host)] for host in self.hosts if self.told}

    @property
    def exclude(self) -> str:
        """The nodes to leave out, as srun takes them; "" for none, or where that leaves none."""
        blamed = dict.fromkeys(node for check in self.checks for node in check.nodes)
        return "" if blamed.keys() >= set(self.hosts) else listed(blamed)

    def table(self) -> dict[str, Any]:
        """Return what --json holds."""
        return {
            "exit_code": exit_code(self.checks),
            "exclude": self.exclude,
            "checks": [asdict(check) for check in self.checks],
            "ranks": [dict(zip(seats.COLUMNS, row, strict=True)) for row in self.map],
            "versions": [one.versions for one in self.told],
            "nodes": {host: one.hardware for host, one in self.nodes.items()},
            "cores": [asdict(one) for one in self.cores],
            "pings": [asdict(one) for one in self.pings],
        }
