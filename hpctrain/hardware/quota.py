"""CPU quota of control groups: a container sees all cores, but may use a part of their time.

    version 2   cpu.max                    "400000 100000": 400 ms in each 100 ms; "max": no limit
    version 1   cpu.cfs_quota_us, cpu.cfs_period_us         the same; -1: no limit

A process that has used up the quota is stopped until the period ends, with all its threads. Each
group above a process may limit it: the smallest limit counts.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and Documentation/scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpctrain.hardware.pci import ROOT, read

GROUPS = "sys/fs/cgroup"


def cores(root: Path = ROOT) -> float | None:
    """Return the CPU time of this process in cores; None where nothing limits it."""
    limits = [limit for group in groups("cpu", root) if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of this process's groups, from the root down."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        top = root / GROUPS / controller if kinds else root / GROUPS
        # In a container `path` may be the host's: then only `top` exists, and is the container's.
        parts = Path(path).parts[1:]
        yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _limit(group: Path) -> float | None:
    words = read(group / "cpu.max").split()
    words = words or [read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota, period = map(int, words)
    except ValueError:  # no limit, or no such group in sight
        return None
    return quota / period if quota > 0 else None
