"""Topology of PCI devices: NUMA node, nearest cores, and the path between two devices.

    /sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:00.0/0000:83:00.0
                 host bridge   root port   up port      down port    device
                                           `--- PCIe switch ---'

The path between two devices has a name as in `nvidia-smi topo`, nearest first: PIX one switch, PXB
several switches, PHB the host bridge, NODE two host bridges of one NUMA node, SYS two NUMA nodes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path

ROOT = Path("/")
PCI_FOLDER = "sys/bus/pci/devices"
NUMA_FOLDER = "sys/devices/system/node"
RELATIONS = ("PIX", "PXB", "PHB", "NODE", "SYS")


def normalize_address(address: str) -> str:
    """Return an address of NVML or CUDA, "00000000:1B:00.0", as sysfs writes it: "0000:1b:00.0"."""
    domain, bus, device = address.strip().lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device if '.' in device else device + '.0'}"


def numa_node(device: str, root: Path = ROOT) -> int | None:
    """Return the NUMA node of the PCI address `device`; None if unknown."""
    text = read_text(root / PCI_FOLDER / device / "numa_node")
    return int(text) if text.isdigit() else None  # "-1": firmware does not report it


def near_cores(device: str, root: Path = ROOT) -> frozenset[int]:
    """Return the cores nearest to `device`; empty if unknown."""
    return frozenset(parse_core_list(read_text(root / PCI_FOLDER / device / "local_cpulist")))


def relation(device: str, other: str, root: Path = ROOT) -> str | None:
    """Return the name of the path between two devices; None if sysfs lacks either."""
    first_path, second_path = device_path(device, root), device_path(other, root)
    if not first_path or not second_path:
        return None
    equal_parts = (a == b for a, b in zip(first_path, second_path, strict=False))
    common_length = len(list(takewhile(bool, equal_parts)))
    if common_length == 0:
        nodes = {numa_node(device, root), numa_node(other, root)}
        return "NODE" if len(nodes) == 1 and None not in nodes else "SYS"
    if common_length == 1:
        return "PHB"
    # Below one bridge or one switch: only down port and device differ.
    return "PIX" if max(len(first_path), len(second_path)) - common_length <= 2 else "PXB"


def device_path(device: str, root: Path = ROOT) -> list[str]:
    """Return the PCI devices from the host bridge down to `device`; empty if it does not exist."""
    link = root / PCI_FOLDER / device
    parts = Path(os.path.realpath(link)).parts if link.exists() else ()
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), None)
    return [] if start is None else list(parts[start:])


def nearest_devices(device: str, candidates: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return the `candidates` nearest to `device`; empty without topology in sysfs.

    For devices on other NUMA nodes, such as parts of one socket, the kernel's distance decides.
    """
    relations = {candidate: relation(device, candidate, root) for candidate in candidates}
    device_node = numa_node(device, root)
    distances = {
        candidate: (
            RELATIONS.index(relation_name),
            numa_distance(device_node, numa_node(candidate, root), root),
        )
        for candidate, relation_name in relations.items()
        if relation_name
    }
    return [
        candidate
        for candidate, distance in distances.items()
        if distance == min(distances.values())
    ]


def devices_nearest_to_cores(
    cores: Collection[int], candidates: Sequence[str], root: Path = ROOT
) -> list[str]:
    """Return the `candidates` whose NUMA nodes are nearest to one of `cores`; all if unknown.

    All devices are near a process that may run on all NUMA nodes.
    """
    core_nodes = [node for node, node_cores in numa_cores(root).items() if node_cores & set(cores)]
    distances = {
        candidate: min(
            (
                numa_distance(device_node, numa_node(candidate, root), root)
                for device_node in core_nodes
            ),
            default=0,
        )
        for candidate in candidates
    }
    return [
        candidate for candidate in candidates if distances[candidate] == min(distances.values())
    ]


def numa_core_lists(root: Path = ROOT) -> dict[int, str]:
    """Return the cores of each NUMA node as the kernel writes them, such as "0-3,8"."""
    folders = (root / NUMA_FOLDER).glob("node[0-9]*")
    folders_by_number = {int(folder.name.removeprefix("node")): folder for folder in folders}
    return {n: read_text(folder / "cpulist") for n, folder in sorted(folders_by_number.items())}


def numa_cores(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node."""
    return {n: frozenset(parse_core_list(text)) for n, text in numa_core_lists(root).items()}


def numa_distance(first: int | None, second: int | None, root: Path = ROOT) -> int:
    """Return the kernel's distance of two NUMA nodes, 10 for the same node; 0 if unknown."""
    if first is None or second is None:
        return 0
    distances = read_text(root / NUMA_FOLDER / f"node{first}" / "distance").split()
    nodes = [
        node
        for node, distance in zip(numa_cores(root), distances, strict=False)
        if distance.isdigit()
    ]
    if first == second or second not in nodes:
        return 10 if first == second else 20
    return int(distances[nodes.index(second)])


def parse_core_list(core_ranges: str) -> tuple[int, ...]:
    """Return the core numbers of the kernel's "0-3,8,10-11"."""
    cores: list[int] = []
    for core_range in filter(None, core_ranges.strip().split(",")):
        first, _, last = core_range.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def read_text(path: Path) -> str:
    """Return the text of a kernel file, without the newline; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
