"""Faults of hosts: disks that are full or fail; on a netlab a cut link, a slow one, a dead host.

A lab counts its processes in a PID namespace of its own; NSpid of /proc maps these ids to ours.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster.netlab.namespaces import INTERFACE
from hpctrain.tools.chaos.case import FailingFile, HostFault

SLOW = "rate 1mbit burst 65536 latency 50ms"
SOURCE = Path(__file__).with_name("failing.c")
ROOM_KIB = 1 << 16


def outer_pid(inner_pid: int) -> int:
    """Return the id in this namespace of the process that a lab counts as `inner_pid`, or 0."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            (line,) = (x for x in status.read_text().splitlines() if x.startswith("NSpid:"))
            outer_id, *_, inner_id = line.split()[1:] * 2
            if int(inner_id) == inner_pid and len(line.split()) > 2:
                return int(outer_id)
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


def build(folder: Path) -> Path:
    """Compile failing.c into `folder`, unless it is there; return the library."""
    library = folder / "failing.so"
    if not library.exists():
        new_library = Path(tempfile.mkdtemp(dir=folder)) / library.name  # others may build it too
        options = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
        command: list[str | Path] = ["cc", *options, "-o", new_library, SOURCE, "-ldl"]
        subprocess.run(command, check=True)
        new_library.rename(library)
        new_library.parent.rmdir()
    return library


def environment(fault: FailingFile, library: Path, run: Path, report: Path) -> dict[str, str]:
    """Return the environment variables that inject `fault` into files of the folder `run`."""
    effect = errno.__dict__.get(fault.effect, fault.effect)
    words = [fault.rank, fault.operation, fault.number, effect, int(fault.stays), report, run]
    return {"LD_PRELOAD": str(library), "CAMPAIGN_DISK": " ".join(map(str, words))}


def mount(folder: Path, kib: int) -> None:
    """Mount a file system of `kib` KiB in memory on `folder`; it ends with the mount namespace."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kib}k", "campaign"]
    subprocess.run(["mount", *options, folder], check=True)


def resize(folder: Path, kib: int = ROOM_KIB) -> None:
    """Change the size of a file system that `mount` made, but not below what lies there."""
    disk = os.statvfs(folder)
    kib = max(kib, (disk.f_blocks - disk.f_bfree) * disk.f_frsize >> 10)
    subprocess.run(["mount", "-o", f"remount,size={kib}k", folder], check=True)
