"""The NVIDIA GPUs of this node and the NVLinks between them, from NVML (package nvidia-ml-py).

NVML makes no context on a GPU. It shows every GPU that the kernel shows to this process, and
ignores CUDA_VISIBLE_DEVICES. Without it a node with the driver's files has GPUs that are not known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

from hpctrain.hardware.pci import ROOT, normalize_address, read_text

DRIVER_FOLDER = "proc/driver/nvidia"
INSTALL_NVML = "pip install nvidia-ml-py, a part of the extras cuda12x and cuda13x"
_SWITCH = "switch"


@dataclass(frozen=True)
class GpuInfo:
    """One GPU; `slices` are the UUIDs of its MIG slices, empty without MIG."""

    index: int
    uuid: str
    name: str
    pci: str
    memory_bytes: int | None = None
    slices: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeGpus:
    """All GPUs of a node, the driver's version, and NVLinks by pair of indices.

    `fault` says why GPUs that the driver has are not known, `remedy` what to do about it.
    """

    driver: str | None = None
    gpus: tuple[GpuInfo, ...] = ()
    nvlinks: Mapping[tuple[int, int], int] = field(default_factory=dict)
    fault: str = ""
    remedy: str = ""


def read_gpus(root: Path = ROOT, nvml: Any = None) -> NodeGpus:
    """Return the GPUs of this node; `nvml` is the module pynvml, by default the installed one."""
    fault, remedy = "the package nvidia-ml-py is not installed", INSTALL_NVML
    try:
        if nvml is None and root == ROOT:
            nvml = import_module("pynvml")
        if nvml is not None:
            return _query_gpus(nvml)
    except ImportError:
        pass
    except nvml.NVMLError as error:
        fault, remedy = f"NVML: {error}", "ask the site, if nvidia-smi shows the same error"
    if not (root / DRIVER_FOLDER).exists():
        return NodeGpus()
    return NodeGpus(driver_version(root), fault=fault, remedy=remedy)


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of the loaded driver; None if no driver is loaded."""
    match = re.search(r"\s(\d+\.\d[\d.]*)\s", read_text(root / DRIVER_FOLDER / "version"))
    return match[1] if match else None


def _query_gpus(nvml: Any) -> NodeGpus:
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(
            GpuInfo(
                index,
                _decode(nvml.nvmlDeviceGetUUID(handle)),
                _decode(nvml.nvmlDeviceGetName(handle)),
                normalize_address(_decode(nvml.nvmlDeviceGetPciInfo(handle).busId)),
                _memory_bytes(nvml, handle),
                _mig_slices(nvml, handle),
            )
            for index, handle in enumerate(handles)
        )
        nvlinks = _count_nvlinks(nvml, handles, [gpu.pci for gpu in gpus])
        return NodeGpus(_decode(nvml.nvmlSystemGetDriverVersion()), gpus, nvlinks)
    finally:
        nvml.nvmlShutdown()


def _memory_bytes(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # the GPU has no memory of its own
        return None


def _mig_slices(nvml: Any, handle: Any) -> tuple[str, ...]:
    slice_names = []
    try:
        mig_mode = nvml.nvmlDeviceGetMigMode(handle)[0]
        max_slices = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if mig_mode else 0
    except nvml.NVMLError:  # this GPU has no MIG
        return ()
    for i in range(max_slices):
        with suppress(
            nvml.NVMLError
        ):  # no slice has this number; one that was removed leaves a gap
            slice_ = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            slice_names.append(_decode(nvml.nvmlDeviceGetUUID(slice_)))
    return tuple(slice_names)


def _count_nvlinks(nvml: Any, handles: Sequence[Any], addresses: Sequence[str]) -> dict[Any, Any]:
    link_ends = [Counter(_nvlink_ends(nvml, handle)) for handle in handles]
    nvlinks = {
        (i, j): link_ends[i][addresses[j]] or min(link_ends[i][_SWITCH], link_ends[j][_SWITCH])
        for i, j in combinations(range(len(handles)), 2)
    }
    return {pair: count for pair, count in nvlinks.items() if count}


def _nvlink_ends(nvml: Any, handle: Any) -> list[str]:
    """Return the far end of each active NVLink of a GPU: the address of a GPU, or a switch."""
    link_ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            remote_pci = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
        except nvml.NVMLError:  # the GPU has no link of this number
            continue
        is_switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        link_ends.append(_SWITCH if is_switch else normalize_address(_decode(remote_pci.busId)))
    return link_ends


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
