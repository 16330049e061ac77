"""The NVIDIA GPUs of this node and the NVLinks between them: from NVML, nvidia-smi or /proc.

NVML (package nvidia-ml-py) reports most. Without it, the driver's own program is used; if that
cannot run, the driver's files are read. No source makes a context on a GPU. All of them show every
GPU that the kernel shows to this process; they ignore CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from hpctrain.hardware.pci import ROOT, normalize_address, read_text

RunNvidiaSmi = Callable[[Sequence[str]], str]  #: the output of nvidia-smi for these arguments
_QUERY_FIELDS = "index,uuid,name,pci.bus_id,memory.total,driver_version"
_MIB = 1 << 20
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
    """All GPUs of a node, their source, the driver's version, and NVLinks by pair of indices."""

    data_source: str = "nobody"
    driver: str | None = None
    gpus: tuple[GpuInfo, ...] = ()
    nvlinks: Mapping[tuple[int, int], int] = field(default_factory=dict)


def read_gpus(root: Path = ROOT, nvml: Any = None, run_smi: RunNvidiaSmi | None = None) -> NodeGpus:
    """Return the GPUs of this node, from the first source that works: NVML, nvidia-smi, /proc."""
    return (
        (nvml and _read_nvml(nvml)) or (run_smi and _read_smi(run_smi)) or _read_driver_files(root)
    )


def import_nvml() -> Any:
    """Return the module pynvml; None where nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def find_nvidia_smi() -> RunNvidiaSmi | None:
    """Return a function that runs nvidia-smi; None where it is not on the PATH."""
    program = shutil.which("nvidia-smi")
    return None if program is None else lambda arguments: _run_command([program, *arguments])


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of the loaded driver; None if no driver is loaded."""
    match = re.search(r"\s(\d+\.\d[\d.]*)\s", read_text(root / "proc/driver/nvidia/version"))
    return match[1] if match else None


def _read_nvml(nvml: Any) -> NodeGpus | None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_query_gpu(nvml, i, handle) for i, handle in enumerate(handles))
        nvlinks = _count_nvlinks(nvml, handles, [gpu.pci for gpu in gpus])
        return NodeGpus("NVML", _decode(nvml.nvmlSystemGetDriverVersion()), gpus, nvlinks)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _query_gpu(nvml: Any, index: int, handle: Any) -> GpuInfo:
    return GpuInfo(
        index,
        _decode(nvml.nvmlDeviceGetUUID(handle)),
        _decode(nvml.nvmlDeviceGetName(handle)),
        normalize_address(_decode(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        _mig_slices(nvml, handle),
    )


def _mig_slices(nvml: Any, handle: Any) -> tuple[str, ...]:
    names = []
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
            names.append(_decode(nvml.nvmlDeviceGetUUID(slice_)))
    return tuple(names)


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


def _read_smi(run_smi: RunNvidiaSmi) -> NodeGpus | None:
    lines = run_smi([f"--query-gpu={_QUERY_FIELDS}", "--format=csv,noheader,nounits"]).splitlines()
    rows = [[word.strip() for word in row] for row in csv.reader(lines) if len(row) == 6]
    if not rows:
        return None
    gpus = [
        GpuInfo(
            int(index),
            uuid,
            name,
            normalize_address(bus),
            int(mib) * _MIB if mib.isdigit() else None,
        )
        for index, uuid, name, bus, mib, _ in rows
    ]
    return NodeGpus("nvidia-smi", rows[0][-1], tuple(gpus), _parse_nvlinks(run_smi(["topo", "-m"])))


def _parse_nvlinks(matrix: str) -> dict[tuple[int, int], int]:
    """Return the NVLinks per pair of GPUs from the matrix of `nvidia-smi topo -m`."""
    plain_matrix = re.sub(r"\x1b\[[\d;]*m", "", matrix)  # headings are underlined, also in a pipe
    rows = [line.split() for line in plain_matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    nvlinks = {}
    for words in rows:
        i = int(words[0].removeprefix("GPU"))
        for j, word in enumerate(words[1 : len(rows) + 1]):
            if i < j and re.fullmatch(r"NV\d+", word):
                nvlinks[i, j] = int(word.removeprefix("NV"))
    return nvlinks


def _read_driver_files(root: Path) -> NodeGpus:
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    gpus = tuple(_read_gpu_file(i, folder) for i, folder in enumerate(folders))
    version = driver_version(root)
    return NodeGpus("/proc/driver/nvidia", version, gpus) if gpus or version else NodeGpus()


def _read_gpu_file(index: int, folder: Path) -> GpuInfo:
    lines = [line.partition(":") for line in read_text(folder / "information").splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    return GpuInfo(
        index, fields.get("GPU UUID", ""), fields.get("Model", ""), normalize_address(folder.name)
    )


def _run_command(command: Sequence[str]) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
