"""A node as text: devices by NUMA node, and the matrix of links between GPUs and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor import network
from hpctrain.hardware import pci
from hpctrain.hardware.nics import Nic, fabric_ports, nearest_ports
from hpctrain.hardware.nvidia import Card, Cards

_KEY = "NV# that many NVLinks, PIX one PCIe switch, PXB several, PHB one host bridge, NODE one \
NUMA node, SYS two"


@dataclass(frozen=True)
class Topology:
    """NUMA nodes by number (cores as the kernel lists them), and the matrix with its headings."""

    numa: dict[int, str]
    headings: tuple[str, ...]
    matrix: tuple[tuple[str, ...], ...]


def find_topology(cards: Cards, nics: Sequence[Nic], root: Path = pci.ROOT) -> Topology:
    """Return the topology of the node below `root` with these GPUs and adapters."""
    devices = [(f"GPU{card.index}", card.pci) for card in cards.cards]
    devices += [(nic.name, nic.pci) for nic in nics if nic.pci]
    wires = {frozenset((f"GPU{i}", f"GPU{j}")): f"NV{n}" for (i, j), n in cards.nvlinks.items()}
    rows = tuple(
        tuple(
            "X" if a == b else wires.get(frozenset((a, b))) or pci.relation(at, to, root) or "?"
            for b, to in devices
        )
        for a, at in devices
    )
    return Topology(_numa(root), tuple(name for name, _ in devices), rows)


def lines(host: str, cards: Cards, nics: Sequence[Nic], topology: Topology, root: Path = pci.ROOT
          ) -> list[str]:  # fmt: skip
    """Return the topology as text: a line per NUMA node; with GPUs the matrix as well.

    With several adapters, a last line names those nearest to each GPU.
    """
    devices_by_node: dict[int | None, list[str]] = {number: [] for number in topology.numa}
    for card in cards.cards:
        devices_by_node.setdefault(pci.numa_node(card.pci, root), []).append(_card_text(card))
    for nic in nics:
        devices_by_node.setdefault(pci.numa_node(nic.pci, root), []).append(network.describe(nic))
    topology_text = [f"node {host}"]
    for number, devices in devices_by_node.items():
        if number in topology.numa:
            topology_text.append(
                f"  NUMA {number}, cores {topology.numa[number]}: {'; '.join(devices) or '-'}"
            )
        else:
            topology_text.append(f"  NUMA node unknown: {'; '.join(devices)}")
    return topology_text + (_matrix(topology) + _nearest(cards, nics, root) if cards.cards else [])


def _nearest(cards: Cards, nics: Sequence[Nic], root: Path) -> list[str]:
    ports = fabric_ports(tuple(nics))
    if len(ports) < 2:
        return []
    nearest_of_cards = [nearest_ports(card.pci, ports, root) for card in cards.cards]
    texts = (
        f"GPU{c.index} {', '.join(n)}" for c, n in zip(cards.cards, nearest_of_cards, strict=True)
    )
    return [f"  near: {'; '.join(texts)}"]


def _matrix(topology: Topology) -> list[str]:
    width = max(map(len, topology.headings)) + 2
    head = "".join(name.ljust(width) for name in ("", *topology.headings))
    rows = [
        "".join(word.ljust(width) for word in (name, *row))
        for name, row in zip(topology.headings, topology.matrix, strict=True)
    ]
    return [f"  {line.rstrip()}" for line in (head, *rows, _KEY)]


def _card_text(card: Card) -> str:
    memory = f" {card.memory_bytes / 2**30:.0f} GiB" if card.memory_bytes else ""
    return f"GPU{card.index} {card.name}{memory}"


def _numa(root: Path) -> dict[int, str]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    numbered = {int(folder.name.removeprefix("node")): folder for folder in folders}
    return {n: pci.read(folder / "cpulist") for n, folder in sorted(numbered.items())}
