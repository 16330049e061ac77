"""The topology of a node: devices by NUMA node, and the matrix of links between them, as text.

Network adapters are checked: state, rate, and those that the environment names for UCX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.hardware import pci
from hpctrain.hardware.nics import Nic, fabric_ports, fastest_port, nearest_ports
from hpctrain.hardware.nvidia import NodeGpus
from hpctrain.hardware.pci import ROOT
from hpctrain.tools.doctor.check import Check
from hpctrain.transport.placement import nearest_nics
from hpctrain.transport.placement.check import EXISTING_PORTS_REMEDY

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
    return Topology(pci.numa_core_lists(root), tuple(name for name, _ in devices), rows)


def format_topology(
    host: str, cards: NodeGpus, nics: Sequence[Nic], topology: Topology, root: Path = pci.ROOT
) -> list[str]:
    """Return the topology as lines of text: one per NUMA node and, with GPUs, the matrix.

    With several adapters, a last line names the adapters nearest to each GPU.
    """
    texts_by_node: dict[int | None, list[str]] = {number: [] for number in topology.numa}
    for card in cards.gpus:
        memory_text = f" {card.memory_bytes / 2**30:.0f} GiB" if card.memory_bytes else ""
        texts_by_node.setdefault(pci.numa_node(card.pci, root), []).append(
            f"GPU{card.index} {card.name}{memory_text}"
        )
    for nic in nics:
        texts_by_node.setdefault(pci.numa_node(nic.pci, root), []).append(describe_nic(nic))
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
    port_texts = (
        f"GPU{c.index} {', '.join(n)}" for c, n in zip(cards.gpus, nearest_by_card, strict=True)
    )
    return [f"  near: {'; '.join(port_texts)}"]


def _format_matrix(topology: Topology) -> list[str]:
    width = max(map(len, topology.headings)) + 2
    header_line = "".join(name.ljust(width) for name in ("", *topology.headings))
    rows = [
        "".join(cell.ljust(width) for cell in (name, *row))
        for name, row in zip(topology.headings, topology.matrix, strict=True)
    ]
    return [f"  {line.rstrip()}" for line in (header_line, *rows, _LEGEND)]


def check_adapters(nics: Sequence[Nic]) -> list[Check]:
    """Return the checks of the adapters."""
    if not nics:
        return [Check("network", "note", "no hardware adapter in /sys/class")]
    fastest_nic = fastest_port(tuple(nics))
    observed = ", ".join(map(describe_nic, nics))
    checks = [Check("network", "ok" if fastest_nic else "note", observed)]
    down_ports = [nic for nic in nics if nic.has_rdma and not nic.active]
    if down_ports:
        names = ", ".join(nic.name for nic in down_ports)
        checks.append(
            Check("links down", "slow", names, "see ibstat and ibdev2netdev, and ask the site")
        )
    slow_ports = _slow_ports(nics)
    if slow_ports:
        names = ", ".join(f"{nic.name} {nic.gbit_s:g} Gbit/s" for nic in slow_ports)
        checks.append(
            Check("slow links", "slow", names, "a cable or a port may be damaged: tell the site")
        )
    return checks


def check_named_nics(
    nics: Sequence[Nic], environ: Mapping[str, str], root: Path = ROOT
) -> list[Check]:
    """Return the check of the adapters that UCX_NET_DEVICES names; [] if it is not set."""
    value = environ.get(nearest_nics.UCX_DEVICES, "")
    if not nearest_nics.device_names(value):
        return []
    faults = nearest_nics.device_faults(value, nics, root)
    if faults:
        return [
            Check(
                "NICs named",
                "bad",
                f"{nearest_nics.UCX_DEVICES}={value}: {', '.join(faults)}",
                EXISTING_PORTS_REMEDY,
            )
        ]
    return [Check("NICs named", "ok", f"{nearest_nics.UCX_DEVICES}={value}")]


def describe_nic(nic: Nic) -> str:
    """Return the name, kind, rate and state of an adapter as text."""
    rate = f"{nic.gbit_s:g} Gbit/s" if nic.gbit_s else "rate unknown"
    return f"{nic.name} {nic.kind} {rate}{'' if nic.active else ' DOWN'}"


def _slow_ports(nics: Sequence[Nic]) -> list[Nic]:
    """Return the active RDMA ports slower than the node's fastest: damaged links run slower."""
    rdma_ports = [nic for nic in nics if nic.has_rdma and nic.active and nic.gbit_s]
    max_gbit_s = max((nic.gbit_s or 0 for nic in rdma_ports), default=0)
    return [nic for nic in rdma_ports if (nic.gbit_s or 0) < max_gbit_s]
