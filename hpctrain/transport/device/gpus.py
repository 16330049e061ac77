"""Local rank -> GPU, made current before MPI starts.

    4 ranks, 2 GPUs         rank 0 1 2 3   ->   GPU 0 1 0 1        shared in turn, and logged
    a site that shows each rank one GPU    ->   that GPU, which CUDA calls 0

CUDA_VISIBLE_DEVICES is read, never changed: a process cannot map the memory of a GPU that it does
not see, so a rank must see its neighbours' GPUs. GPUs are compared by UUID, which is the same in
every process; CUDA's numbers differ between processes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from hpctrain.core.errors import HereError, UsageError
from hpctrain.core.launchers import Launched
from hpctrain.hardware import pci

Device = Literal["cpu", "gpu", "auto"]
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
#: {major version of CUDA: the extra of hpctrain that installs the CuPy for it}
EXTRAS = {12: "cuda12x", 13: "cuda13x"}
#: The lowest compute capability that the compiler of CUDA 13 knows; Volta has 70.
LOWEST_CAPABILITY_OF_13 = 75


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process sees: its number in this process, its UUID, its PCI address."""

    ordinal: int
    uuid: str
    pci: str  #: address as in sysfs; "" where CUDA does not report it

    def __str__(self) -> str:
        return f"gpu {self.ordinal}, {self.uuid}"


@dataclass(frozen=True)
class GpuChoice:
    """The number of a rank's GPU, as CUDA counts in this process, and a short reason."""

    ordinal: int
    note: str


@dataclass(frozen=True)
class GpuCores:
    """The cores near a rank's GPU, shared by `count` ranks; `index` of this one, or None."""

    cores: frozenset[int]
    index: int | None
    count: int


def choose_gpu(
    launched: Launched, visible_gpus: int, listed_devices: Sequence[str] = ()
) -> GpuChoice:
    """Return the choice among `visible_gpus` GPUs; `listed_devices`: from CUDA_VISIBLE_DEVICES.

    Raises UsageError if no GPU is visible.
    """
    if visible_gpus < 1:
        raise HereError(f"no GPU is visible{_visible_devices_text(listed_devices)}; {_REMEDY}")
    if visible_gpus == 1:
        return GpuChoice(0, "the only one visible" + _mig_note(listed_devices))
    rank, warning = launched.local_rank, ""
    if rank is None:
        rank, warning = launched.rank, ", by its rank: the launcher sets no local rank"
    if launched.local_size is not None and launched.local_size > visible_gpus:
        warning += f"; {launched.local_size} ranks share {visible_gpus} GPUs"
    return GpuChoice(rank % visible_gpus, f"one of {visible_gpus} visible, taken in turn{warning}")


def parse_visible_devices(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES; empty if it is not set."""
    return tuple(
        entry.strip() for entry in environ.get(VISIBLE_DEVICES, "").split(",") if entry.strip()
    )


def job_gpu_count(environ: Mapping[str, str], visible_gpus: int) -> int:
    """Return the number of this node's GPUs in the job, including GPUs hidden from this rank."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return max(visible_gpus, int(count) if count.isdigit() else 0)


def gpu_cores(launched: Launched, ordinal: int, cores: Sequence[frozenset[int]]) -> GpuCores | None:
    """Return the cores near a rank's GPU `ordinal`; `cores`: the cores near each visible GPU.

    None if the machine does not report them. The index of this rank among the ranks near these
    cores is known only where it sees its neighbours' GPUs.
    """
    own_cores = cores[ordinal]
    if not own_cores or launched.local_rank is None or launched.local_size is None:
        return None
    if len(cores) == 1:
        return GpuCores(own_cores, None, launched.local_size)
    local_ranks_near = [
        local_rank
        for local_rank in range(launched.local_size)
        if cores[local_rank % len(cores)] == own_cores
    ]
    return GpuCores(own_cores, local_ranks_near.index(launched.local_rank), len(local_ranks_near))


def visible_gpus(device: Device) -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees, empty for "cpu"; makes no context on them.

    Without a driver, CuPy or GPU, "auto" returns () and "gpu" raises UsageError.
    """
    if device == "cpu" or (device == "auto" and not (driver_cuda_version() and find_spec("cupy"))):
        return ()
    try:
        return _query_visible_gpus()
    except UsageError:
        if device == "gpu":
            raise
        return ()


def use_gpu(ordinal: int) -> None:
    """Make the GPU current in this thread; every thread that uses the GPU must call this.

    Raises UsageError if the GPU is unavailable, since its compute mode may allow only one process,
    or if CuPy has no compiler for it.
    """
    cuda, device = cuda_runtime(), import_cupy().cuda.Device(ordinal)
    try:
        device.use()
        capability = int(device.compute_capability)
    except cuda.CUDARuntimeError as error:
        raise HereError(
            f"GPU {ordinal} cannot be used: {error}; if nvidia-smi shows the compute mode "
            "'E. Process', start one rank per GPU, MPS, or let it be set to DEFAULT"
        ) from None
    if cuda.runtimeGetVersion() >= 13000 and capability < LOWEST_CAPABILITY_OF_13:
        raise HereError(
            f"GPU {ordinal} has compute capability {capability / 10}, and CuPy was made for CUDA "
            f"13, which compiles for {LOWEST_CAPABILITY_OF_13 / 10} and newer: "
            "pip uninstall cupy-cuda13x; pip install 'hpctrain[cuda12x]'"
        )


def cuda_runtime() -> Any:
    """Return CuPy's module of the CUDA runtime."""
    return import_cupy().cuda.runtime


def select_gpu(device: Device, launched: Launched) -> Gpu | None:
    """Make a GPU current for this process and return it; None: compute on the CPU.

    For processes without MPI; ranks use placement/rank_placement.py. Raises UsageError if `device`
    is "gpu" and no GPU is available.
    """
    gpus = visible_gpus(device)
    if not gpus:
        return None
    gpu = gpus[choose_gpu(launched, len(gpus), parse_visible_devices(os.environ)).ordinal]
    use_gpu(gpu.ordinal)
    return gpu


def product_name(ordinal: int) -> str:
    """Return the product name of the GPU, such as NVIDIA H200."""
    name = cuda_runtime().getDeviceProperties(ordinal)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def free_gpu_bytes() -> int:
    """Return the free memory of the current GPU, in bytes."""
    return int(cuda_runtime().memGetInfo()[0])


def driver_cuda_version() -> int | None:
    """Return the driver's CUDA version, 12040 for 12.4; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value or None


_REMEDY = "look at `hpctrain doctor`, or take device = 'cpu'"


def _visible_devices_text(listed_devices: Sequence[str]) -> str:
    return f" ({VISIBLE_DEVICES} is {','.join(listed_devices)})" if listed_devices else ""


def _mig_note(listed_devices: Sequence[str]) -> str:
    """Return a note if several MIG slices are listed: CUDA shows only the first slice."""
    if len(listed_devices) < 2 or not listed_devices[0].startswith("MIG-"):
        return ""
    return (
        f", the first of {len(listed_devices)} MIG slices: let the launcher give each rank its own"
    )


def _query_visible_gpus() -> tuple[Gpu, ...]:
    cuda, listed_devices = cuda_runtime(), parse_visible_devices(os.environ)
    try:
        count = cuda.getDeviceCount()
    except cuda.CUDARuntimeError as error:
        raise HereError(_startup_error_text(str(error), cuda.runtimeGetVersion())) from None
    if not count:
        raise HereError(f"no GPU is visible{_visible_devices_text(listed_devices)}; {_REMEDY}")
    return tuple(
        Gpu(i, _query_uuid(i, listed_devices), _query_pci_address(cuda, i)) for i in range(count)
    )


def import_cupy() -> Any:
    """Return the module `cupy`; without it, raise UsageError with the extra to install."""
    try:
        import cupy
    except ImportError as error:
        raise HereError(
            f"device = 'gpu' needs CuPy: pip install 'hpctrain[{_matching_extra()}]'; seen: {error}"
        ) from None
    return cupy


def _startup_error_text(error: str, cupy_cuda_version: int) -> str:
    """Return the reason why CUDA does not start with a CuPy for `cupy_cuda_version`."""
    driver_version, cupy_major = driver_cuda_version(), cupy_cuda_version // 1000
    if driver_version is None:
        return f"no GPU: this machine has no NVIDIA driver (libcuda.so.1); {_REMEDY}"
    if driver_version // 1000 < cupy_major:
        return (
            f"CuPy was made for CUDA {cupy_major}, and the driver brings "
            f"{driver_version // 1000}.{driver_version % 1000 // 10}: pip uninstall "
            f"cupy-cuda{cupy_major}x; "
            f"pip install 'hpctrain[{_matching_extra()}]'"
        )
    listed_devices = parse_visible_devices(os.environ)
    return f"CUDA finds no GPU ({error}){_visible_devices_text(listed_devices)}; {_REMEDY}"


def _matching_extra() -> str:
    major = (driver_cuda_version() or 0) // 1000
    if major >= 13 and any(c < LOWEST_CAPABILITY_OF_13 for c in _query_capabilities()):
        major = 12
    return EXTRAS.get(major, EXTRAS[max(EXTRAS)])


def _query_capabilities() -> Iterator[int]:
    """Yield the compute capability of each visible GPU, 70 for 7.0, as the driver reports it."""
    count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    with suppress(OSError, AttributeError):  # no driver
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return
        for i in range(count.value):
            cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, i)
            cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, i)
            yield 10 * major.value + minor.value


def _query_uuid(ordinal: int, listed_devices: Sequence[str]) -> str:
    """Return the UUID of a GPU or MIG slice; CUDA must have been initialized."""
    if ordinal < len(listed_devices) and listed_devices[ordinal].startswith("MIG-"):
        return listed_devices[ordinal]
    uuid_bytes, device = (ctypes.c_ubyte * 16)(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        has_failed = cuda.cuDeviceGet(ctypes.byref(device), ordinal) or get_uuid(uuid_bytes, device)
    except (OSError, AttributeError):
        has_failed = True
    if has_failed:
        return f"GPU-number-{ordinal}"
    uuid_hex = bytes(uuid_bytes).hex()
    return "GPU-" + "-".join(
        (uuid_hex[:8], uuid_hex[8:12], uuid_hex[12:16], uuid_hex[16:20], uuid_hex[20:])
    )


def _query_pci_address(cuda: Any, ordinal: int) -> str:
    try:
        return pci.normalize_address(cuda.deviceGetPCIBusId(ordinal))
    except (cuda.CUDARuntimeError, ValueError):
        return ""
