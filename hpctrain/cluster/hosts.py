"""The hosts of a Slurm allocation on which ranks can be started after the loss of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpctrain.cluster.slurm.batch_job import output, remaining_nodes
from hpctrain.core import launchers


class Host(NamedTuple):
    """A host and the number of ranks that it has room for."""

    name: str
    slots: int


def allocated_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts of this job of Slurm; empty outside of one, or without an answer."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    host_names = output("scontrol", "show", "hostnames", nodes).split() if nodes else []
    return [Host(*pair) for pair in zip(host_names, launchers.task_counts(environ), strict=False)]


def remaining_hosts(hosts: Sequence[Host]) -> list[Host]:
    """Return the `hosts` that Slurm does not report as lost; all without an answer."""
    remaining_names = remaining_nodes(",".join(host.name for host in hosts))
    return [host for host in hosts if remaining_names is None or host.name in remaining_names]


def host_options(vendor: str, hosts: Sequence[Host]) -> list[str]:
    """Return the options of mpiexec that start ranks on `hosts` alone; none if empty."""
    option = "--host" if vendor == "Open MPI" else "-hosts"
    return [option, ",".join(f"{name}:{slots}" for name, slots in hosts)] if hosts else []
