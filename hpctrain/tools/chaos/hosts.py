"""Faults of the hosts of a netlab: a cut link, a slow one, a dead host.

A lab counts its processes in a PID namespace of its own; NSpid of /proc maps these ids to ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster.netlab.namespaces import INTERFACE
from hpctrain.tools.chaos.case import HostFault

SLOW = "rate 1mbit burst 65536 latency 50ms"


def outer_pid(inner_pid: int) -> int:
    """Return the id in this namespace of the process that a lab counts as `inner_pid`, or 0."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            (line,) = (x for x in status.read_text().splitlines() if x.startswith("NSpid:"))
            outer, *_, inner = line.split()[1:] * 2
            if int(inner) == inner_pid and len(line.split()) > 2:
                return int(outer)
    return 0


def disturb(pid: int, fault: HostFault) -> bool:
    """Do `fault` to the host of process `pid`; return whether it took place."""
    if not pid:
        return False
    if fault.effect == "slow":
        return _enter(pid, f"tc qdisc replace dev {INTERFACE} root tbf {SLOW}")
    # A dead host sends no farewell: its link is cut before its processes are killed.
    took_place = _enter(pid, f"ip link set {INTERFACE} down")
    for victim in _neighbours(pid) if fault.effect == "dead" else ():
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    return took_place


def _enter(pid: int, command: str) -> bool:
    words = ["nsenter", "--target", str(pid), "--net", *command.split()]
    return subprocess.run(words, capture_output=True).returncode == 0


def _neighbours(pid: int) -> list[int]:
    """Return the processes of the host of `pid`: those in its network namespace."""
    host = os.readlink(f"/proc/{pid}/ns/net")
    result = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):
            if os.readlink(link) == host:
                result.append(int(link.parts[2]))
    return result
