"""Memory available to this process, limited by the machine and by its control groups.

    version 2   memory.max, memory.current, memory.stat: file
    version 1   memory.limit_in_bytes, memory.usage_in_bytes, memory.stat: total_cache

Cached pages of files count as free: the kernel drops them when a process needs memory. Each group
above a process may limit it: the smallest limit counts.

Source: Linux, Documentation/admin-guide/cgroup-v2.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpctrain.hardware.pci import ROOT, read_text
from hpctrain.hardware.quota import control_groups

_CGROUP_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def available_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes available without swapping; None where the system does not report them."""
    free_kib = _parse_fields(root / "proc/meminfo").get("MemAvailable")
    limits_bytes = [] if free_kib is None else [free_kib << 10]
    for group in control_groups("memory", root):
        limits_bytes += _free_bytes_in_group(group)
    return min(limits_bytes, default=None)


def _free_bytes_in_group(group: Path) -> Iterator[int]:
    """Yield the bytes available in a control group if it has a limit."""
    for limit_file, usage_file, cache_field in _CGROUP_FILES:
        limit, usage = read_text(group / limit_file), read_text(group / usage_file)
        if limit.isdigit() and usage.isdigit():  # "max": no limit
            used_bytes = int(usage) - _parse_fields(group / "memory.stat").get(cache_field, 0)
            yield max(0, int(limit) - used_bytes)


def _parse_fields(file: Path) -> dict[str, int]:
    """Return {name: number} from a kernel file with one name and number per line."""
    lines = (line.replace(":", " ").split() for line in read_text(file).splitlines())
    return {
        fields[0]: int(fields[1]) for fields in lines if len(fields) > 1 and fields[1].isdigit()
    }
