"""The hosts of a Slurm allocation on which ranks can be started after the loss of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpctrain.cluster.slurm.queries import NoAnswerError, run_command
from hpctrain.core import launchers

#: States of nodes on which no rank can be started; * marks a node that does not respond.
_LOST_STATE = re.compile(r"(?:down|fail|error|unk|boot|powering_down).*|.*\*")


class Host(NamedTuple):
    """A host and the number of ranks that it has room for."""

    name: str
    slots: int


def allocated_hosts(environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts of this job of Slurm; empty outside of one, or without an answer."""
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    names = _output("scontrol", "show", "hostnames", nodes).split() if nodes else []
    return [Host(*pair) for pair in zip(names, launchers.task_counts(environ), strict=False)]


def remaining_hosts(hosts: Sequence[Host]) -> list[Host]:
    """Return those of `hosts` that Slurm does not report as lost."""
    names = ",".join(host.name for host in hosts)
    query = ("sinfo", "--noheader", "--Node", f"--nodes={names}", "--format=%N %T")
    states = [line.split() for line in _output(*query).splitlines()] if hosts else []
    lost_names = {name for name, state in states if _LOST_STATE.fullmatch(state)}
    return [host for host in hosts if host.name not in lost_names]


def _output(*command: str) -> str:
    """Return the output of a command of Slurm; empty if it fails."""
    try:
        return run_command(command).stdout
    except (NoAnswerError, OSError):
        return ""


def host_options(vendor: str, hosts: Sequence[Host]) -> list[str]:
    """Return the options of mpiexec that start ranks on `hosts` alone; none if empty."""
    option = "--host" if vendor == "Open MPI" else "-hosts"
    return [option, ",".join(f"{name}:{slots}" for name, slots in hosts)] if hosts else []
