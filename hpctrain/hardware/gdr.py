"""GPUDirect RDMA: whether the kernel allows a NIC to read and write GPU memory by itself.

Either a module hands the GPU's pages to the InfiniBand stack (nvidia_peermem, before it
nv_peer_mem), or driver and kernel share them as a dmabuf: Linux 5.12, NVIDIA's open kernel modules
from driver 515 on. This shows permission, not use: use shows in the rate of transfers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.hardware.nics import Nic
from hpctrain.hardware.pci import ROOT, read

MODULES = {
    "nvidia_peermem": "sys/module/nvidia_peermem",
    "nv_peer_mem": "sys/module/nv_peer_mem",
    "nv_mem": "sys/kernel/mm/memory_peers/nv_mem",
}
DMABUF_LINUX, DMABUF_DRIVER = (5, 12), 515


@dataclass(frozen=True)
class Gdr:
    """The state of GPUDirect RDMA: the observation, the remedy; available or not, or None."""

    evidence: str
    remedy: str = ""
    available: bool | None = None


def gdr(nics: Sequence[Nic], root: Path = ROOT) -> Gdr:
    """Return the state of GPUDirect RDMA through `nics`."""
    if not any(nic.rdma for nic in nics):
        return Gdr("no adapter that does RDMA", available=False)
    if not any(nic.rdma and nic.active for nic in nics):
        return Gdr(
            "no active port of an adapter that does RDMA", "ask the site: ibstat", available=False
        )
    module = next((name for name, path in MODULES.items() if (root / path).exists()), None)
    if module is not None:
        return Gdr(f"module {module} is loaded", available=True)
    return _dmabuf(read(root / "proc/driver/nvidia/version"), read(root / _RELEASE))


_RELEASE = "proc/sys/kernel/osrelease"


def _dmabuf(driver: str, release: str) -> Gdr:
    linux = tuple(int(n) for n in re.findall(r"\d+", release)[:2])
    version = re.search(r"\s(\d+)\.\d+", driver)
    if not version or not linux:
        return Gdr("neither the driver nor Linux tells its version")
    lacks = [
        reason
        for reason, condition in {
            f"Linux {release} is older than 5.12": linux >= DMABUF_LINUX,
            "the driver's kernel modules are not the open ones": "Open Kernel Module" in driver,
            f"driver {version[1]} is older than {DMABUF_DRIVER}": int(version[1]) >= DMABUF_DRIVER,
        }.items()
        if not condition
    ]
    if lacks:
        remedy = "ask the site to load nvidia_peermem (modprobe nvidia-peermem)"
        return Gdr("no nvidia_peermem; no dmabuf: " + ", ".join(lacks), remedy, available=False)
    return Gdr("dmabuf: Linux, driver and its open kernel modules have it", available=True)
