"""The topology of a node: devices by NUMA node, and the matrix of links between them, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.hardware import pci
from hpctrain.hardware.nics import Nic, fabric_ports, nearest_ports
from hpctrain.hardware.nvidia import GpuInfo, NodeGpus
from hpctrain.tools.doctor import network

_LEGEND = "NV# that many NVLinks, PIX one PCIe switch, PXB several, PHB one host bridge, NODE one \
NUMA node, SYS two"


@dataclass(frozen=True)
class Topology:
    """The core lists of NUMA nodes by number, and the matrix of links with its headings."""

    numa: dict[int, str]
    headings: tuple[str, ...]
    matrix: tuple[tuple[str, ...], ...]


def find_topology(cards: NodeGpus, nics: Sequence[Nic], root: Path = pci.ROOT) -> Topology:
    """Return the topology of the node below `root` with these GPUs and adapters."""
    devices = [(f"GPU{card.index}", card.pci) for card in cards.gpus]
    devices += [(nic.name, nic.pci) for nic in nics if nic.pci]
    nvlinks = {frozenset((f"GPU{i}", f"GPU{j}")): f"NV{n}" for (i, j), n in cards.nvlinks.items()}
    rows = tuple(
        tuple(
            "X"
            if a == b
            else nvlinks.get(frozenset((a, b))) or pci.relation(pci_a, pci_b, root) or "?"
            for b, pci_b in devices
        )
        for a, pci_a in devices
    )
    return Topology(_read_numa_nodes(root), tuple(name for name, _ in devices), rows)


def format_topology(
    host: str, cards: NodeGpus, nics: Sequence[Nic], topology: Topology, root: Path = pci.ROOT
) -> list[str]:
    """Return the topology as lines of text: one per NUMA node and, with GPUs, the matrix.

    With several adapters, a last line names the adapters nearest to each GPU.
    """
    texts_by_node: dict[int | None, list[str]] = {number: [] for number in topology.numa}
    for card in cards.gpus:
        texts_by_node.setdefault(pci.numa_node(card.pci, root), []).append(_format_card(card))
    for nic in nics:
        texts_by_node.setdefault(pci.numa_node(nic.pci, root), []).append(network.describe_nic(nic))
    lines = [f"node {host}"]
    for number, devices in texts_by_node.items():
        if number in topology.numa:
            text = "; ".join(devices) or "no GPU or adapter"
            lines.append(f"  NUMA {number}, cores {topology.numa[number]}: {text}")
        else:
            lines.append(f"  NUMA node unknown: {'; '.join(devices)}")
    return lines + (
        _format_matrix(topology) + _format_nearest_ports(cards, nics, root) if cards.gpus else []
    )


def _format_nearest_ports(cards: NodeGpus, nics: Sequence[Nic], root: Path) -> list[str]:
    ports = fabric_ports(tuple(nics))
    if len(ports) < 2:
        return []
    nearest_by_card = [nearest_ports(card.pci, ports, root) for card in cards.gpus]
    texts = (
        f"GPU{c.index} {', '.join(n)}" for c, n in zip(cards.gpus, nearest_by_card, strict=True)
    )
    return [f"  near: {'; '.join(texts)}"]


def _format_matrix(topology: Topology) -> list[str]:
    width = max(map(len, topology.headings)) + 2
    header = "".join(name.ljust(width) for name in ("", *topology.headings))
    rows = [
        "".join(word.ljust(width) for word in (name, *row))
        for name, row in zip(topology.headings, topology.matrix, strict=True)
    ]
    return [f"  {line.rstrip()}" for line in (header, *rows, _LEGEND)]


def _format_card(card: GpuInfo) -> str:
    memory_text = f" {card.memory_bytes / 2**30:.0f} GiB" if card.memory_bytes else ""
    return f"GPU{card.index} {card.name}{memory_text}"


def _read_numa_nodes(root: Path) -> dict[int, str]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    folders_by_number = {int(folder.name.removeprefix("node")): folder for folder in folders}
    return {n: pci.read_text(folder / "cpulist") for n, folder in sorted(folders_by_number.items())}
