"""Network adapters, their state and rate, from /sys/class/infiniband and /sys/class/net.

One entry per port. A network interface that is another face of an InfiniBand or RoCE adapter is
left out: the adapter stands for it.
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
    """A port of an adapter; `gbit_s` is what the link was built for, None where it is not told."""

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
    ports = [_port(port) for one in adapters for port in sorted((one / "ports").glob("*"))]
    taken = {nic.pci for nic in ports}
    faces = [_interface(one) for one in sorted((root / "sys/class/net").glob("*"))]
    return (*ports, *(nic for nic in faces if nic is not None and nic.pci not in taken))


def fastest(found: tuple[Nic, ...]) -> Nic | None:
    """Return the active port of the highest known rate, one that does RDMA if there is any."""
    known = [nic for nic in found if nic.active and nic.gbit_s]
    return max(known, key=lambda nic: (nic.rdma, nic.gbit_s), default=None)


def near(found: tuple[Nic, ...], gpu: str, root: Path = ROOT) -> Nic | None:
    """Return the fastest active port among those nearest to the device at address `gpu`.

    Where sysfs does not tell what is near, the fastest of all; RDMA goes before rate.
    """
    usable = [nic for nic in found if nic.active and nic.gbit_s]
    usable = [nic for nic in usable if nic.rdma] or usable
    close = set(nearest(gpu, [nic.pci for nic in usable if nic.pci], root))
    return fastest(tuple(nic for nic in usable if nic.pci in close)) or fastest(tuple(usable))


def rails(found: tuple[Nic, ...]) -> tuple[Nic, ...]:
    """Return the active ports that are alike and together the fastest: what nodes meet through.

    RDMA goes before rate. Others are for files, for services, or trained down when they were hurt.
    """
    active = [nic for nic in found if nic.active]
    active = [nic for nic in active if nic.rdma] or active
    alike: dict[tuple[str, float], list[Nic]] = {}
    for nic in active:
        alike.setdefault((nic.kind, nic.gbit_s or 0), []).append(nic)
    return tuple(max(alike.values(), key=lambda same: sum(n.gbit_s or 0 for n in same), default=()))


def nearest_ports(gpu: str, ports: Sequence[Nic], root: Path = ROOT) -> tuple[str, ...]:
    """Return the names of those of `ports` nearest to a GPU, of all where sysfs does not tell."""
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
    speed = read(interface / "speed")  # in Mbit/s; "-1" or nothing where it is not known
    gbit_s = int(speed) / 1000 if speed.isdigit() else None
    active = read(interface / "operstate") == "up"
    return Nic(interface.name, "Ethernet", active, gbit_s, _address(interface / "device"))


def _address(device: Path) -> str:
    """Return the PCI address of a device: a virtual one sits below the PCI device it belongs to."""
    found = _ADDRESS.findall(os.path.realpath(device))
    return found[-1] if found else ""
