"""Memory still available to this process: of the machine, and of its control groups.

    version 2   memory.max, memory.current, memory.stat: file
    version 1   memory.limit_in_bytes, memory.usage_in_bytes, memory.stat: total_cache

Pages of files count as free: the kernel drops them when a process needs memory. Each group above a
process may limit it: the smallest limit counts. Source: Linux, Documentation/admin-guide/cgroup-v2.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpctrain.hardware.pci import ROOT, read
from hpctrain.hardware.quota import groups

_VERSIONS = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def available_bytes(root: Path = ROOT) -> int | None:
    """Return the bytes available without swapping; None where the system does not report them."""
    free = _fields(root / "proc/meminfo").get("MemAvailable")
    limits_bytes = [] if free is None else [free << 10]
    for group in groups("memory", root):
        limits_bytes += _free_in_group(group)
    return min(limits_bytes, default=None)


def _free_in_group(group: Path) -> Iterator[int]:
    """Yield the bytes left in a group, if it has a limit."""
    for limit, usage, cache in _VERSIONS:
        words = read(group / limit), read(group / usage)
        if all(word.isdigit() for word in words):  # "max": no limit
            used_bytes = int(words[1]) - _fields(group / "memory.stat").get(cache, 0)
            yield max(0, int(words[0]) - used_bytes)


def _fields(file: Path) -> dict[str, int]:
    """Return the numbers of a file of the kernel by their names, one per line."""
    lines = (line.replace(":", " ").split() for line in read(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
