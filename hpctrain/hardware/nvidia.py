"""The NVIDIA GPUs of this node and the NVLinks between them: from NVML, nvidia-smi or /proc.

NVML (package nvidia-ml-py) reports most; where it is not installed the driver's own program is
used, and where that cannot run, the driver's files. None of them makes a context on a GPU. All show
every GPU that the kernel lets this process see; they ignore CUDA_VISIBLE_DEVICES.
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

from hpctrain.hardware.pci import ROOT, address, read

Smi = Callable[[Sequence[str]], str]  #: the output of nvidia-smi for these arguments
_QUERY = "index,uuid,name,pci.bus_id,memory.total,driver_version"
_MIB = 1 << 20
_SWITCH = "switch"


@dataclass(frozen=True)
class Card:
    """One GPU; `slices` are the names of its MIG slices, none where it is not cut."""

    index: int
    uuid: str
    name: str
    pci: str
    memory_bytes: int | None = None
    slices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cards:
    """All GPUs of a node, their source, the driver's version, and NVLinks by pair of indices."""

    data_source: str = "nobody"
    driver: str | None = None
    cards: tuple[Card, ...] = ()
    nvlinks: Mapping[tuple[int, int], int] = field(default_factory=dict)


def cards(root: Path = ROOT, nvml: Any = None, smi: Smi | None = None) -> Cards:
    """Return the GPUs of this node, from the first source that works: NVML, nvidia-smi, /proc."""
    return (nvml and _read_nvml(nvml)) or (smi and _read_smi(smi)) or _read_driver_files(root)


def nvml() -> Any:
    """Return the module pynvml; None where nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def smi() -> Smi | None:
    """Return a function that runs nvidia-smi; None where it is not on the PATH."""
    program = shutil.which("nvidia-smi")
    return None if program is None else lambda arguments: _output([program, *arguments])


def driver(root: Path = ROOT) -> str | None:
    """Return the version of the loaded driver; None where none is."""
    match = re.search(r"\s(\d+\.\d[\d.]*)\s", read(root / "proc/driver/nvidia/version"))
    return match[1] if match else None


def _read_nvml(nvml: Any) -> Cards | None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_card(nvml, i, handle) for i, handle in enumerate(handles))
        wires = _nvlinks(nvml, handles, [card.pci for card in gpus])
        return Cards("NVML", _text(nvml.nvmlSystemGetDriverVersion()), gpus, wires)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int, handle: Any) -> Card:
    return Card(
        index,
        _text(nvml.nvmlDeviceGetUUID(handle)),
        _text(nvml.nvmlDeviceGetName(handle)),
        address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        _slices(nvml, handle),
    )


def _slices(nvml: Any, handle: Any) -> tuple[str, ...]:
    names = []
    try:
        mig_mode = nvml.nvmlDeviceGetMigMode(handle)[0]
        max_slices = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if mig_mode else 0
    except nvml.NVMLError:  # it cannot be cut
        return ()
    for i in range(max_slices):
        with suppress(
            nvml.NVMLError
        ):  # no slice has this number; one that was removed leaves a gap
            slice_ = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            names.append(_text(nvml.nvmlDeviceGetUUID(slice_)))
    return tuple(names)


def _nvlinks(nvml: Any, handles: Sequence[Any], addresses: Sequence[str]) -> dict[Any, Any]:
    link_ends = [Counter(_far_ends(nvml, handle)) for handle in handles]
    wires = {
        (i, j): link_ends[i][addresses[j]] or min(link_ends[i][_SWITCH], link_ends[j][_SWITCH])
        for i, j in combinations(range(len(handles)), 2)
    }
    return {pair: count for pair, count in wires.items() if count}


def _far_ends(nvml: Any, handle: Any) -> list[str]:
    """Return the far end of each active NVLink of a GPU: the address of a GPU, or a switch."""
    link_ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            remote_pci = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
        except nvml.NVMLError:  # fewer links, or none
            continue
        switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        link_ends.append(_SWITCH if switch else address(_text(remote_pci.busId)))
    return link_ends


def _read_smi(smi: Smi) -> Cards | None:
    lines = smi([f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]).splitlines()
    rows = [[word.strip() for word in row] for row in csv.reader(lines) if len(row) == 6]
    if not rows:
        return None
    gpus = [
        Card(int(index), uuid, name, address(bus), int(mib) * _MIB if mib.isdigit() else None)
        for index, uuid, name, bus, mib, _ in rows
    ]
    return Cards("nvidia-smi", rows[0][-1], tuple(gpus), _drawn_nvlinks(smi(["topo", "-m"])))


def _drawn_nvlinks(matrix: str) -> dict[tuple[int, int], int]:
    """Return the NVLinks in the matrix that `nvidia-smi topo -m` draws."""
    plain_matrix = re.sub(r"\x1b\[[\d;]*m", "", matrix)  # headings are underlined, also in a pipe
    rows = [line.split() for line in plain_matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    nvlinks = {}
    for words in rows:
        i = int(words[0].removeprefix("GPU"))
        for j, word in enumerate(words[1 : len(rows) + 1]):
            if i < j and re.fullmatch(r"NV\d+", word):
                nvlinks[i, j] = int(word.removeprefix("NV"))
    return nvlinks


def _read_driver_files(root: Path) -> Cards:
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    gpus = tuple(_of_file(i, folder) for i, folder in enumerate(folders))
    version = driver(root)
    return Cards("/proc/driver/nvidia", version, gpus) if gpus or version else Cards()


def _of_file(index: int, folder: Path) -> Card:
    lines = [line.partition(":") for line in read(folder / "information").splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    return Card(index, fields.get("GPU UUID", ""), fields.get("Model", ""), address(folder.name))


def _output(command: Sequence[str]) -> str:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout if process.returncode == 0 else ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
