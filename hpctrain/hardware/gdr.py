"""GPUDirect RDMA: whether the kernel allows a NIC to read and write GPU memory directly.

Either a kernel module hands the GPU's pages to the InfiniBand stack (nvidia_peermem, formerly
nv_peer_mem), or driver and kernel share them as a dmabuf: Linux 5.12, NVIDIA's open kernel modules
from driver 515 on. The result shows permission only; the rate of transfers shows use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.hardware.nics import Nic
from hpctrain.hardware.pci import ROOT, read_text

KERNEL_MODULES = {
    "nvidia_peermem": "sys/module/nvidia_peermem",
    "nv_peer_mem": "sys/module/nv_peer_mem",
    "nv_mem": "sys/kernel/mm/memory_peers/nv_mem",
}
MIN_DMABUF_LINUX, MIN_DMABUF_DRIVER = (5, 12), 515


@dataclass(frozen=True)
class GdrState:
    """The state of GPUDirect RDMA: evidence, remedy, availability (None: unknown)."""

    evidence: str
    remedy: str = ""
    available: bool | None = None


def gdr_state(nics: Sequence[Nic], root: Path = ROOT) -> GdrState:
    """Return the state of GPUDirect RDMA through `nics`."""
    if not any(nic.has_rdma for nic in nics):
        return GdrState("no adapter with RDMA", available=False)
    if not any(nic.has_rdma and nic.active for nic in nics):
        return GdrState(
            "no active port of an adapter with RDMA", "ask the site: ibstat", available=False
        )
    module = next((name for name, path in KERNEL_MODULES.items() if (root / path).exists()), None)
    if module is not None:
        return GdrState(f"module {module} is loaded", available=True)
    return _dmabuf_state(
        read_text(root / "proc/driver/nvidia/version"), read_text(root / _KERNEL_RELEASE_FILE)
    )


_KERNEL_RELEASE_FILE = "proc/sys/kernel/osrelease"


def _dmabuf_state(driver: str, kernel_release: str) -> GdrState:
    linux_version = tuple(int(n) for n in re.findall(r"\d+", kernel_release)[:2])
    driver_version = re.search(r"\s(\d+)\.\d+", driver)
    if not driver_version or not linux_version:
        return GdrState("the version of the driver or of Linux is unknown")
    unmet_conditions = [
        reason
        for reason, is_met in {
            f"Linux {kernel_release} is older than 5.12": linux_version >= MIN_DMABUF_LINUX,
            "the driver's kernel modules are not the open ones": "Open Kernel Module" in driver,
            f"driver {driver_version[1]} is older than {MIN_DMABUF_DRIVER}": int(driver_version[1])
            >= MIN_DMABUF_DRIVER,
        }.items()
        if not is_met
    ]
    if unmet_conditions:
        remedy = "ask the site to load nvidia_peermem (modprobe nvidia-peermem)"
        return GdrState(
            "no nvidia_peermem; no dmabuf: " + ", ".join(unmet_conditions), remedy, available=False
        )
    return GdrState(
        "dmabuf: supported by Linux, the driver and its open kernel modules", available=True
    )
