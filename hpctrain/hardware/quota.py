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

from hpctrain.hardware.pci import ROOT, read_text

CGROUP_FOLDER = "sys/fs/cgroup"


def quota_cores(root: Path = ROOT) -> float | None:
    """Return the CPU quota of this process in cores; None without a limit."""
    limits = [
        limit for group in control_groups("cpu", root) if (limit := _cpu_limit(group)) is not None
    ]
    return min(limits, default=None)


def control_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from the root down."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root_group = root / CGROUP_FOLDER / controller if controllers else root / CGROUP_FOLDER
        # In a container `path` may be the host's: then only the container's `root_group` exists.
        parts = Path(path).parts[1:]
        yield from (root_group.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))


def _cpu_limit(group: Path) -> float | None:
    quota_and_period = read_text(group / "cpu.max").split()
    quota_and_period = quota_and_period or [
        read_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")
    ]
    try:
        quota, period = map(int, quota_and_period)
    except ValueError:  # no limit, or the group is not visible here
        return None
    return quota / period if quota > 0 else None
