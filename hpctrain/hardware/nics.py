"""Network adapters, their state and rate, from /sys/class/infiniband and /sys/class/net.

One entry per port. The network interface of an InfiniBand or RoCE adapter is left out: the adapter
stands for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.hardware.pci import ROOT, nearest, read

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Nic:
    """A port of an adapter; `gbit_s` is the nominal rate of its link, None where it is unknown."""

    name: str
    kind: str  #: "InfiniBand", "RoCE" or "Ethernet"
    active: bool
    gbit_s: float | None
    pci: str  #: address, "" for none

    @property
    def rdma(self) -> bool:
        """Whether it reads and writes memory by itself."""
        return self.kind != "Ethernet"


def nics(root: Path = ROOT) -> tuple[Nic, ...]:
    """Return the ports of this machine, those that do RDMA first."""
    adapters = sorted((root / "sys/class/infiniband").glob("*"))
    ports = [_port(port) for adapter in adapters for port in sorted((adapter / "ports").glob("*"))]
    addresses = {nic.pci for nic in ports}
    ethernet = [_interface(interface) for interface in sorted((root / "sys/class/net").glob("*"))]
    return (*ports, *(nic for nic in ethernet if nic is not None and nic.pci not in addresses))


def fastest(ports: tuple[Nic, ...]) -> Nic | None:
    """Return the active port of the highest known rate, one that does RDMA if there is any."""
    candidates = [nic for nic in ports if nic.active and nic.gbit_s]
    return max(candidates, key=lambda nic: (nic.rdma, nic.gbit_s), default=None)


def nearest_port(ports: tuple[Nic, ...], gpu: str, root: Path = ROOT) -> Nic | None:
    """Return the fastest active port among those nearest to the device at address `gpu`.

    Without topology in sysfs, the fastest of all; RDMA counts before rate.
    """
    usable = [nic for nic in ports if nic.active and nic.gbit_s]
    usable = [nic for nic in usable if nic.rdma] or usable
    close = set(nearest(gpu, [nic.pci for nic in usable if nic.pci], root))
    return fastest(tuple(nic for nic in usable if nic.pci in close)) or fastest(tuple(usable))


def fabric_ports(ports: tuple[Nic, ...]) -> tuple[Nic, ...]:
    """Return the active ports of the kind and rate that together are the fastest: the fabric.

    RDMA counts before rate. Other ports serve files or services, or are damaged and trained down.
    """
    active = [nic for nic in ports if nic.active]
    active = [nic for nic in active if nic.rdma] or active
    ports_by_kind: dict[tuple[str, float], list[Nic]] = {}
    for nic in active:
        ports_by_kind.setdefault((nic.kind, nic.gbit_s or 0), []).append(nic)
    return tuple(
        max(ports_by_kind.values(), key=lambda same: sum(n.gbit_s or 0 for n in same), default=())
    )


def nearest_ports(gpu: str, ports: Sequence[Nic], root: Path = ROOT) -> tuple[str, ...]:
    """Return the names of the `ports` nearest to a GPU, of all without topology in sysfs."""
    close = nearest(gpu, [nic.pci for nic in ports if nic.pci], root)
    return tuple(nic.name for nic in ports if nic.pci in close or not close)


def _port(port: Path) -> Nic:
    adapter = port.parent.parent
    kind = "RoCE" if read(port / "link_layer") == "Ethernet" else "InfiniBand"
    rate = re.match(r"[\d.]+", read(port / "rate"))  # "200 Gb/sec (4X HDR)"
    active = "ACTIVE" in read(port / "state")  # "4: ACTIVE"
    gbit_s = float(rate[0]) if rate else None
    return Nic(f"{adapter.name}:{port.name}", kind, active, gbit_s, _address(adapter / "device"))


def _interface(interface: Path) -> Nic | None:
    """Return a network interface; None for one that is no hardware, such as lo or a bridge."""
    if not (interface / "device").exists():
        return None
    speed = read(interface / "speed")  # in Mbit/s; "-1" or nothing where unknown
    gbit_s = int(speed) / 1000 if speed.isdigit() else None
    active = read(interface / "operstate") == "up"
    return Nic(interface.name, "Ethernet", active, gbit_s, _address(interface / "device"))


def _address(device: Path) -> str:
    """Return the PCI address of a device; of a virtual one, that of the PCI device above it."""
    addresses = _ADDRESS.findall(os.path.realpath(device))
    return addresses[-1] if addresses else ""
