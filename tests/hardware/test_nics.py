"""Network adapters and GPUDirect RDMA of simulated machines."""

from __future__ import annotations

import pytest
from machines import ethernet, infiniband, pci_device, write

from hpctrain.hardware.gdr import gdr_state
from hpctrain.hardware.nics import Nic, fastest_port, nearest_port, read_nics

IB, ETH = "pci0000:10/0000:10:01.0/0000:11:00.0", "pci0000:80/0000:80:02.0/0000:82:00.0"
VIRTUAL = "pci0000:20/0000:20:03.0"


def test_ports_and_interfaces(tmp_path):
    infiniband(tmp_path, "mlx5_0", IB, "200 Gb/sec (4X HDR)")
    ethernet(tmp_path, "eno1", 25000, ETH)
    ethernet(tmp_path, "lo", "")
    (tmp_path / "sys/class/net/ib0").mkdir()
    (tmp_path / "sys/class/net/ib0/device").symlink_to(tmp_path / "sys/devices" / IB)
    assert read_nics(tmp_path) == (
        Nic("mlx5_0:1", "InfiniBand", True, 200.0, "0000:11:00.0"),
        Nic("eno1", "Ethernet", True, 25.0, "0000:82:00.0"),
    )


def test_roce_down_and_unknown_rates(tmp_path):
    down = {"state": "1: DOWN", "link_layer": "Ethernet"}
    infiniband(tmp_path, "mlx5_1", IB, "", **down)
    ethernet(tmp_path, "eth0", "-1", VIRTUAL, state="unknown")
    # a virtio device lies below its PCI device
    (tmp_path / "sys/devices" / VIRTUAL / "virtio0").mkdir()
    link = tmp_path / "sys/class/net/eth0/device"
    link.unlink()
    link.symlink_to(tmp_path / "sys/devices" / VIRTUAL / "virtio0")
    assert read_nics(tmp_path) == (
        Nic("mlx5_1:1", "RoCE", False, None, "0000:11:00.0"),
        Nic("eth0", "Ethernet", False, None, "0000:20:03.0"),
    )


def test_a_machine_without_any(tmp_path):
    assert read_nics(tmp_path) == ()
    assert fastest_port(()) is None


def test_fastest_prefers_rdma():
    slow, fast = Nic("a", "InfiniBand", True, 100.0, ""), Nic("b", "Ethernet", True, 400.0, "")
    assert fastest_port((fast, slow)) == slow
    assert fastest_port((fast, Nic("c", "RoCE", False, 800.0, ""))) == fast


def test_the_adapter_near_a_gpu(tmp_path):
    switch = "pci0000:10/0000:10:01.0/0000:11:00.0"
    pci_device(tmp_path, f"{switch}/0000:12:00.0/0000:13:00.0")
    infiniband(tmp_path, "mlx5_0", f"{switch}/0000:12:01.0/0000:14:00.0", "200 Gb/sec (4X HDR)")
    infiniband(tmp_path, "mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0", "400 Gb/sec (4X NDR)")
    ethernet(tmp_path, "eno1", 800000, f"{switch}/0000:12:02.0/0000:15:00.0")
    result = read_nics(tmp_path)
    assert nearest_port(result, "0000:13:00.0", tmp_path).name == "mlx5_0:1"
    assert nearest_port(result, "", tmp_path).name == "mlx5_1:1"
    assert nearest_port(result[2:], "0000:13:00.0", tmp_path).name == "eno1"
    assert nearest_port((), "0000:13:00.0", tmp_path) is None


UP, DOWN = Nic("mlx5_0:1", "InfiniBand", True, 400.0, ""), Nic("m:1", "InfiniBand", False, None, "")
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"
DRIVER, LINUX = "proc/driver/nvidia/version", "proc/sys/kernel/osrelease"
# adapters, files below the root -> available, words of what was seen and of the remedy
GDR = {
    "peermem": ([UP], {"sys/module/nvidia_peermem/version": "1"}, True, "nvidia_peermem", ""),
    "older": ([UP], {"sys/kernel/mm/memory_peers/nv_mem/version": "1"}, True, "nv_mem", ""),
    "dmabuf": ([UP], {DRIVER: OPEN, LINUX: "6.8.0-45-generic"}, True, "dmabuf", ""),
    "old Linux": ([UP], {DRIVER: OPEN, LINUX: "4.18.0-513.el8"}, False, "older than 5.12",
                  "peermem"),
    "closed modules": ([UP], {DRIVER: CLOSED, LINUX: "5.14.0"}, False, "not the open ones",
                       "modprobe"),
    "unknown": ([UP], {LINUX: "5.14.0"}, None, "neither", ""),
    "down": ([DOWN], {}, False, "no active port", "ibstat"),
    "Ethernet": ([Nic("eth0", "Ethernet", True, 25.0, "")], {}, False, "no adapter", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", GDR)
def test_gdr(case, tmp_path):
    adapters, files, available, observed, remedy = GDR[case]
    write(tmp_path, files)
    result = gdr_state(adapters, tmp_path)
    assert result.available is available
    assert observed in result.evidence
    assert remedy in result.remedy
