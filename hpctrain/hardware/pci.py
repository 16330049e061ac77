"""Topology of PCI devices: NUMA node, nearest cores, and the path between two devices.

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
    """Return "0000:1b:00.0", the form of sysfs, for NVML's "00000000:1B:00.0" or CUDA's."""
    domain, bus, device = text.strip().lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device if '.' in device else device + '.0'}"


def numa_node(device: str, root: Path = ROOT) -> int | None:
    """Return the NUMA node of the `device` at that address; None where it is unknown."""
    text = read(root / DEVICES / device / "numa_node")
    return int(text) if text.isdigit() else None  # "-1": firmware does not report it


def near_cores(device: str, root: Path = ROOT) -> frozenset[int]:
    """Return the cores nearest to `device`, none where they are unknown."""
    return frozenset(core_list(read(root / DEVICES / device / "local_cpulist")))


def relation(device: str, other: str, root: Path = ROOT) -> str | None:
    """Return the word for the path between two devices; None where sysfs lacks one of them."""
    first, second = bridges(device, root), bridges(other, root)
    if not first or not second:
        return None
    equal_parts = (a == b for a, b in zip(first, second, strict=False))
    common = len(list(takewhile(bool, equal_parts)))
    if common == 0:
        nodes = {numa_node(device, root), numa_node(other, root)}
        return "NODE" if len(nodes) == 1 and None not in nodes else "SYS"
    if common == 1:
        return "PHB"
    # Below one bridge or one switch: only down port and device differ.
    return "PIX" if max(len(first), len(second)) - common <= 2 else "PXB"


def bridges(device: str, root: Path = ROOT) -> list[str]:
    """Return the path from the host bridge down to `device`; empty where it does not exist."""
    link = root / DEVICES / device
    parts = Path(os.path.realpath(link)).parts if link.exists() else ()
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), None)
    return [] if start is None else list(parts[start:])


def nearest(device: str, candidates: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return the `candidates` nearest to `device`; none without topology in sysfs.

    Among other NUMA nodes, such as two quarters of one socket, the kernel's distance decides.
    """
    relations = {other: relation(device, other, root) for other in candidates}
    device_node = numa_node(device, root)
    distances = {
        other: (RELATIONS.index(word), numa_distance(device_node, numa_node(other, root), root))
        for other, word in relations.items()
        if word
    }
    return [other for other, far in distances.items() if far == min(distances.values())]


def nearest_to_cores(
    cores: Collection[int], candidates: Sequence[str], root: Path = ROOT
) -> list[str]:
    """Return the `candidates` whose NUMA nodes are nearest to one of `cores`; all where unknown.

    For a process that may run on all NUMA nodes that is any device.
    """
    core_nodes = [node for node, node_cores in numa_cores(root).items() if node_cores & set(cores)]
    far = {
        other: min(
            (
                numa_distance(device_node, numa_node(other, root), root)
                for device_node in core_nodes
            ),
            default=0,
        )
        for other in candidates
    }
    return [other for other in candidates if far[other] == min(far.values())]


def numa_cores(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node."""
    folders = {
        int(folder.name.removeprefix("node")): folder
        for folder in (root / NODES).glob("node[0-9]*")
    }
    return {n: frozenset(core_list(read(folders[n] / "cpulist"))) for n in sorted(folders)}


def numa_distance(first: int | None, second: int | None, root: Path = ROOT) -> int:
    """Return the kernel's distance of two NUMA nodes, 10 for the same node; 0 where unknown."""
    if first is None or second is None:
        return 0
    distances = read(root / NODES / f"node{first}" / "distance").split()
    nodes = [node for node, far in zip(numa_cores(root), distances, strict=False) if far.isdigit()]
    if first == second or second not in nodes:
        return 10 if first == second else 20
    return int(distances[nodes.index(second)])


def core_list(text: str) -> tuple[int, ...]:
    """Return the numbers in the kernel's "0-3,8,10-11"."""
    cores: list[int] = []
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def read(path: Path) -> str:
    """Return the text of a file of the kernel, without the newline; "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
