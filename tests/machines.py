"""Made-up machines: a folder that looks like the /sys and /proc of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: host bridge -> NUMA node, the cores near it
SOCKETS = {"pci0000:10": (0, "0-3"), "pci0000:20": (0, "0-3"), "pci0000:80": (1, "4-7")}


def pci_device(root: Path, way: str) -> Path:
    """Make the PCI device at the end of `way`, from its host bridge down; return its folder."""
    folder = root / "sys" / "devices" / way
    folder.mkdir(parents=True)
    node, cores = SOCKETS[way.split("/")[0]]
    write(folder, {"numa_node": node, "local_cpulist": cores})
    link = root / "sys/bus/pci/devices" / folder.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    return folder


def write(folder: Path, files: Mapping[str, object]) -> None:
    """Write `files`, each with a newline at its end, as the kernel does."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content}\n")


def infiniband(root: Path, name: str, way: str, rate: str, **port: object) -> None:
    """Make an InfiniBand adapter of one port, at the end of `way`."""
    folder = root / "sys/class/infiniband" / name
    told = {"state": "4: ACTIVE", "rate": rate, "link_layer": "InfiniBand"} | port
    write(folder / "ports" / "1", told)
    (folder / "device").symlink_to(pci_device(root, way))


def ethernet(root: Path, name: str, speed: object, way: str = "", state: str = "up") -> None:
    """Make a network interface; without a `way` it is no piece of hardware."""
    write(root / "sys/class/net" / name, {"speed": speed, "operstate": state})
    if way:
        (root / "sys/class/net" / name / "device").symlink_to(pci_device(root, way))
