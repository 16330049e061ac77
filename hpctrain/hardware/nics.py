"""Network adapters, their state and rate, from /sys/class/infiniband and /sys/class/net.

One entry per port. The network interface of an InfiniBand or RoCE adapter is left out, since the
adapter itself has an entry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.hardware.pci import ROOT, nearest_devices, read_text

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Nic:
    """A port of an adapter; `gbit_s` is the nominal rate of its link, None if unknown."""

    name: str
    kind: str  #: "InfiniBand", "RoCE" or "Ethernet"
    active: bool
    gbit_s: float | None
    pci: str  #: address, "" for none

    @property
    def has_rdma(self) -> bool:
        """Whether the adapter reads and writes memory without the CPU."""
        return self.kind != "Ethernet"


def read_nics(root: Path = ROOT) -> tuple[Nic, ...]:
    """Return the ports of this machine, ports with RDMA first."""
    adapters = sorted((root / "sys/class/infiniband").glob("*"))
    ports = [
        _read_port(port) for adapter in adapters for port in sorted((adapter / "ports").glob("*"))
    ]
    addresses = {nic.pci for nic in ports}
    interfaces = [
        _read_interface(interface) for interface in sorted((root / "sys/class/net").glob("*"))
    ]
    return (*ports, *(nic for nic in interfaces if nic is not None and nic.pci not in addresses))


def fastest_port(ports: tuple[Nic, ...]) -> Nic | None:
    """Return the active port of the highest known rate; ports with RDMA come first."""
    candidates = [nic for nic in ports if nic.active and nic.gbit_s]
    return max(candidates, key=lambda nic: (nic.has_rdma, nic.gbit_s), default=None)


def nearest_port(ports: tuple[Nic, ...], gpu_address: str, root: Path = ROOT) -> Nic | None:
    """Return the fastest active port among those nearest to the GPU at PCI address `gpu_address`.

    Without topology in sysfs all ports count as near. RDMA counts before rate.
    """
    usable_ports = [nic for nic in ports if nic.active and nic.gbit_s]
    usable_ports = [nic for nic in usable_ports if nic.has_rdma] or usable_ports
    nearest_addresses = set(
        nearest_devices(gpu_address, [nic.pci for nic in usable_ports if nic.pci], root)
    )
    return fastest_port(
        tuple(nic for nic in usable_ports if nic.pci in nearest_addresses)
    ) or fastest_port(tuple(usable_ports))


def fabric_ports(ports: tuple[Nic, ...]) -> tuple[Nic, ...]:
    """Return the fabric: the active ports of the kind and rate with the highest total rate.

    RDMA counts before rate. Other ports carry storage or services, or have a damaged link.
    """
    active_ports = [nic for nic in ports if nic.active]
    active_ports = [nic for nic in active_ports if nic.has_rdma] or active_ports
    ports_by_kind: dict[tuple[str, float], list[Nic]] = {}
    for nic in active_ports:
        ports_by_kind.setdefault((nic.kind, nic.gbit_s or 0), []).append(nic)
    return tuple(
        max(
            ports_by_kind.values(),
            key=lambda nics_of_kind: sum(nic.gbit_s or 0 for nic in nics_of_kind),
            default=(),
        )
    )


def nearest_ports(gpu_address: str, ports: Sequence[Nic], root: Path = ROOT) -> tuple[str, ...]:
    """Return the names of the `ports` nearest to a GPU; of every port without topology in sysfs."""
    nearest_addresses = nearest_devices(gpu_address, [nic.pci for nic in ports if nic.pci], root)
    return tuple(nic.name for nic in ports if nic.pci in nearest_addresses or not nearest_addresses)


def _read_port(port: Path) -> Nic:
    adapter = port.parent.parent
    kind = "RoCE" if read_text(port / "link_layer") == "Ethernet" else "InfiniBand"
    rate_match = re.match(r"[\d.]+", read_text(port / "rate"))  # "200 Gb/sec (4X HDR)"
    active = "ACTIVE" in read_text(port / "state")  # "4: ACTIVE"
    gbit_s = float(rate_match[0]) if rate_match else None
    return Nic(
        f"{adapter.name}:{port.name}", kind, active, gbit_s, _pci_address(adapter / "device")
    )


def _read_interface(interface: Path) -> Nic | None:
    """Return a network interface; None for a virtual one, such as lo or a bridge."""
    if not (interface / "device").exists():
        return None
    speed = read_text(interface / "speed")  # in Mbit/s; "-1" or nothing where unknown
    gbit_s = int(speed) / 1000 if speed.isdigit() else None
    active = read_text(interface / "operstate") == "up"
    return Nic(interface.name, "Ethernet", active, gbit_s, _pci_address(interface / "device"))


def _pci_address(device: Path) -> str:
    """Return the PCI address of a device; for a virtual device, of the PCI device above it."""
    addresses = _PCI_ADDRESS.findall(os.path.realpath(device))
    return addresses[-1] if addresses else ""
