"""Where a PCI device sits: its NUMA node, the cores near it, what lies between it and another.

    /sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0/0000:83:00.0
                 host bridge   root port   up port      down port    device
                                           `--- PCIe switch ---'

Words for a pair, nearest first, as `nvidia-smi topo` uses them: PIX one switch between them, PXB
several, PHB the host bridge, NODE two host bridges of one NUMA node, SYS two NUMA nodes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path

ROOT = Path("/")
DEVICES = "sys/bus/pci/devices"
NODES = "sys/devices/system/node"
RELATIONS = ("PIX", "PXB", "PHB", "NODE", "SYS")


def address(text: str) -> str:
    """Return "0000:1b:00.0", as sysfs has it, of NVML's "00000000:1B:00.0" or CUDA's."""
    domain, bus, device = text.strip().lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device if '.' in device else device + '.0'}"


def numa_node(device: str, root: Path = ROOT) -> int | None:
    """Return the NUMA node of the `device` at that address; None where the machine tells none."""
    said = read(root / DEVICES / device / "numa_node")
    return int(said) if said.isdigit() else None  # "-1": firmware does not say


def near_cores(device: str, root: Path = ROOT) -> frozenset[int]:
    """Return the cores nearest to `device`, none where the machine does not tell."""
    return frozenset(core_list(read(root / DEVICES / device / "local_cpulist")))


def relation(one: str, other: str, root: Path = ROOT) -> str | None:
    """Return the word for what lies between two devices; None where sysfs lacks one of them."""
    first, second = bridges(one, root), bridges(other, root)
    if not first or not second:
        return None
    same = (a == b for a, b in zip(first, second, strict=False))
    common = len(list(takewhile(bool, same)))
    if common == 0:
        nodes = {numa_node(device, root) for device in (one, other)}
        return "NODE" if len(nodes) == 1 and None not in nodes else "SYS"
    if common == 1:
        return "PHB"
    # Below one bridge, or one switch: down port and device are what each has to itself.
    return "PIX" if max(len(first), len(second)) - common <= 2 else "PXB"


def bridges(device: str, root: Path = ROOT) -> list[str]:
    """Return the way from the host bridge down to `device`; empty where it is not there."""
    link = root / DEVICES / device
    parts = Path(os.path.realpath(link)).parts if link.exists() else ()
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), None)
    return [] if start is None else list(parts[start:])


def nearest(device: str, others: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return those of `others` that lie nearest to `device`; none where sysfs does not tell.

    Of those on other NUMA nodes, such as two quarters of one socket, the kernel's distance tells.
    """
    found = {other: relation(device, other, root) for other in others}
    home = numa_node(device, root)
    known = {
        other: (RELATIONS.index(word), numa_distance(home, numa_node(other, root), root))
        for other, word in found.items()
        if word
    }
    return [other for other, far in known.items() if far == min(known.values())]


def nearest_to_cores(cores: Collection[int], others: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return those of `others` whose NUMA nodes are nearest to one of `cores`; all where unknown.

    For who may run on all NUMA nodes that is any device.
    """
    homes = [node for node, there in numa_cores(root).items() if there & set(cores)]
    far = {
        other: min((numa_distance(home, numa_node(other, root), root) for home in homes), default=0)
        for other in others
    }
    return [other for other in others if far[other] == min(far.values())]


def numa_cores(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node."""
    found = {int(one.name.removeprefix("node")): one for one in (root / NODES).glob("node[0-9]*")}
    return {n: frozenset(core_list(read(found[n] / "cpulist"))) for n in sorted(found)}


def numa_distance(one: int | None, other: int | None, root: Path = ROOT) -> int:
    """Return the kernel's figure for two NUMA nodes, 10 for one and the same; 0 where unknown."""
    if one is None or other is None:
        return 0
    told = read(root / NODES / f"node{one}" / "distance").split()
    there = [node for node, far in zip(numa_cores(root), told, strict=False) if far.isdigit()]
    if one == other or other not in there:
        return 10 if one == other else 20
    return int(told[there.index(other)])


def core_list(text: str) -> tuple[int, ...]:
    """Return the numbers in the kernel's "0-3,8,10-11"."""
    cores: list[int] = []
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def read(path: Path) -> str:
    """Return what a file of the kernel says, without the newline; "" where it says nothing."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
