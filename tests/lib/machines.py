"""Simulated machines: folders with the contents of /sys and /proc."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: host bridge -> NUMA node, the cores near it
SOCKETS = {"pci0000:10": (0, "0-3"), "pci0000:20": (0, "0-3"), "pci0000:80": (1, "4-7")}


def pci_device(root: Path, way: str, numa: int | None = None) -> Path:
    """Make the PCI device at the end of `way`, from its host bridge down; return its folder."""
    folder = root / "sys" / "devices" / way
    folder.mkdir(parents=True)
    node, cores = SOCKETS[way.split("/")[0]] if numa is None else (numa, "")
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


def infiniband(
    root: Path, name: str, way: str, rate: str, numa: int | None = None, **port: object
) -> None:
    """Make an InfiniBand adapter of one port, at the end of `way`."""
    folder = root / "sys/class/infiniband" / name
    reported = {"state": "4: ACTIVE", "rate": rate, "link_layer": "InfiniBand"} | port
    write(folder / "ports" / "1", reported)
    (folder / "device").symlink_to(pci_device(root, way, numa))


def ethernet(root: Path, name: str, speed: object, way: str = "", state: str = "up") -> None:
    """Make a network interface; without a `way` it is no piece of hardware."""
    write(root / "sys/class/net" / name, {"speed": speed, "operstate": state})
    if way:
        (root / "sys/class/net" / name / "device").symlink_to(pci_device(root, way))


HDR, HDR100 = "200 Gb/sec (4X HDR)", "100 Gb/sec (2X HDR)"
ROCE, DOWN = {"link_layer": "Ethernet"}, {"state": "1: DOWN"}


def numa_nodes(root: Path, cores: list[str], sockets: int = 1) -> None:
    """Make NUMA nodes with these cores, dealt to `sockets` in blocks."""
    count = len(cores)
    for item, target in enumerate(cores):
        same = [item * sockets // count == other * sockets // count for other in range(count)]
        far = [10 if other == item else 12 if same[other] else 32 for other in range(count)]
        folder = root / f"sys/devices/system/node/node{item}"
        write(folder, {"cpulist": target, "distance": " ".join(map(str, far))})


def switch(
    root: Path, number: int, numa: int, gpus: int, ports: Mapping[str, Mapping[str, object]],
    rate: str = HDR, per_card: int = 1,
) -> list[str]:  # fmt: skip
    """Make PCIe switch `number` with GPUs and adapters below it; return the GPUs' addresses."""
    n = f"{number:x}"
    above = f"pci0000:{n}0/0000:{n}0:01.0/0000:{n}1:00.0"
    for i, (name, port) in enumerate(ports.items()):
        card, function = divmod(i, per_card)
        way = f"{above}/0000:{n}2:1{card}.0/0000:{n}{8 + card:x}:00.{function}"
        infiniband(root, name, way, rate, numa, **port)
    ways = [f"{above}/0000:{n}2:0{i}.0/0000:{n}{3 + i}:00.0" for i in range(gpus)]
    return [pci_device(root, way, numa).name for way in ways]


def juwels_booster(root: Path, **of_one: object) -> list[str]:
    """Make a node of four GPUs, each with an adapter, on four of eight NUMA nodes.

    As ICON's run_wrapper quotes `nvidia-smi topo` of it; `of_one` is said of the port of mlx5_2.
    """
    numa_nodes(root, [f"{6 * n}-{6 * n + 5}" for n in range(8)], sockets=2)
    gpus = []
    for i, numa in enumerate((3, 1, 7, 5)):
        gpus += switch(root, i + 1, numa, 1, {f"mlx5_{i}": of_one if i == 2 else {}})
    return gpus


def leonardo(root: Path) -> list[str]:
    """Make a node of one socket, four GPUs and two cards of two ports; how they sit is made up."""
    numa_nodes(root, ["0-31"])
    remaining = switch(root, 1, 0, 2, {"mlx5_0": {}, "mlx5_1": {}}, HDR100, per_card=2)
    return remaining + switch(root, 2, 0, 2, {"mlx5_2": {}, "mlx5_3": {}}, HDR100, per_card=2)


def dgx(root: Path) -> list[str]:
    """Make a node of eight GPUs and eight adapters, two of each below a switch, and two for files.

    As of a DGX A100; those for files speak Ethernet.
    """
    numa_nodes(root, ["0-63", "64-127"], sockets=2)
    gpus = []
    for n in range(4):
        first = 2 * n + 2 * (n > 1)
        gpus += switch(root, n + 1, n // 2, 2, {f"mlx5_{first}": {}, f"mlx5_{first + 1}": {}})
    switch(root, 5, 0, 0, {"mlx5_4": ROCE})
    switch(root, 6, 1, 0, {"mlx5_5": ROCE})
    return gpus


def two_sockets(root: Path) -> list[str]:
    """Make a node without GPUs, an adapter on each of two sockets, and Ethernet."""
    numa_nodes(root, ["0-3", "4-7"], sockets=2)
    switch(root, 1, 0, 0, {"mlx5_0": {}})
    switch(root, 2, 1, 0, {"mlx5_1": {}})
    ethernet(root, "eno1", 25000, "pci0000:80/0000:80:02.0/0000:82:00.0")
    return []


def one_adapter(root: Path) -> list[str]:
    """Make a node of two sockets and one adapter."""
    numa_nodes(root, ["0-3", "4-7"], sockets=2)
    return switch(root, 1, 0, 1, {"mlx5_0": {}})
