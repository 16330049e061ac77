"""Local rank -> GPU, made current before MPI starts.

    4 ranks, 2 GPUs         rank 0 1 2 3   ->   GPU 0 1 0 1        shared in turn, and logged
    a site that shows each rank one GPU    ->   that GPU, which CUDA calls 0

CUDA_VISIBLE_DEVICES is read and never narrowed: a process cannot map the memory of a GPU that it
does not see, so a rank must see its neighbours' GPUs. A *name* of a GPU is its UUID,
the same for every process: CUDA's numbers are each process's own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from hpctrain.core.errors import HereError, UsageError
from hpctrain.core.launchers import Launched
from hpctrain.hardware import pci

Device = Literal["cpu", "gpu", "auto"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: CUDA's major version: the extra of ours whose CuPy is made for it
EXTRAS = {12: "cuda12x", 13: "cuda13x"}


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process sees: CUDA's number for it here, its name, its PCI address."""

    ordinal: int
    uuid: str
    pci: str  #: address as in sysfs; "" where CUDA does not report it

    def __str__(self) -> str:
        return f"gpu {self.ordinal}, {self.uuid}"


@dataclass(frozen=True)
class GpuChoice:
    """The number of the GPU a rank takes, as CUDA counts here, and the reason in a few words."""

    ordinal: int
    note: str


@dataclass(frozen=True)
class GpuCores:
    """The cores near a rank's GPU; it is rank `index` of `count` near them, None: unknown."""

    cores: frozenset[int]
    index: int | None
    count: int


def gpu_for(launched: Launched, visible_gpus: int, listed: Sequence[str] = ()) -> GpuChoice:
    """Return the choice among `visible_gpus` GPUs; `listed` is CUDA_VISIBLE_DEVICES, split.

    Raises UsageError where there is none.
    """
    if visible_gpus < 1:
        raise HereError(f"no GPU is visible{_as_listed(listed)}; {_REMEDY}")
    if visible_gpus == 1:
        return GpuChoice(0, "the only one visible" + _one_slice(listed))
    rank, unsure = launched.local_rank, ""
    if rank is None:
        rank, unsure = launched.rank, ", by its rank: the launcher sets no local rank"
    if launched.local_size is not None and launched.local_size > visible_gpus:
        unsure += f"; {launched.local_size} ranks share {visible_gpus} GPUs"
    return GpuChoice(rank % visible_gpus, f"one of {visible_gpus} visible, taken in turn{unsure}")


def listed(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of CUDA_VISIBLE_DEVICES; none where it is not set."""
    return tuple(entry.strip() for entry in environ.get(VISIBLE, "").split(",") if entry.strip())


def of_job(environ: Mapping[str, str], visible_gpus: int) -> int:
    """Return the number of this node's GPUs in the job, with those hidden from this rank."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return max(visible_gpus, int(count) if count.isdigit() else 0)


def gpu_cores(launched: Launched, ordinal: int, cores: Sequence[frozenset[int]]) -> GpuCores | None:
    """Return the cores near GPU `ordinal` of a rank; `cores`: those near each visible GPU.

    None where the machine does not report them. The index of this rank among the ranks near these
    cores is known only where it sees its neighbours' GPUs.
    """
    own_cores = cores[ordinal]
    if not own_cores or launched.local_rank is None or launched.local_size is None:
        return None
    if len(cores) == 1:
        return GpuCores(own_cores, None, launched.local_size)
    local_ranks_of_block = [
        r for r in range(launched.local_size) if cores[r % len(cores)] == own_cores
    ]
    return GpuCores(
        own_cores, local_ranks_of_block.index(launched.local_rank), len(local_ranks_of_block)
    )


def visible_gpus(device: Device) -> tuple[Gpu, ...]:
    """Return the GPUs that this process sees, none for "cpu"; no context is made on any.

    Where something is missing "auto" returns none and "gpu" raises UsageError.
    """
    if device == "cpu" or (device == "auto" and not (driver_cuda() and find_spec("cupy"))):
        return ()
    try:
        return _visible()
    except UsageError:
        if device == "gpu":
            raise
        return ()


def use(ordinal: int) -> None:
    """Make the GPU current in this thread; threads that use it later call this, too.

    Raises UsageError where it is unavailable: its compute mode may allow one process only.
    """
    cuda = runtime()
    try:
        cupy_module().cuda.Device(ordinal).use()
    except cuda.CUDARuntimeError as error:
        raise HereError(
            f"GPU {ordinal} cannot be used: {error}; if nvidia-smi shows the compute mode "
            "'E. Process', start one rank per GPU, MPS, or let it be set to DEFAULT"
        ) from None


def runtime() -> Any:
    """Return CUDA's runtime as CuPy offers it."""
    return cupy_module().cuda.runtime


def select_gpu(device: Device, launched: Launched) -> Gpu | None:
    """Make a GPU current for this process and return it; None: it computes on its cores.

    For processes without MPI; see `seat` for ranks. Raises UsageError if `device` is "gpu" and none
    is available.
    """
    gpus = visible_gpus(device)
    if not gpus:
        return None
    gpu = gpus[gpu_for(launched, len(gpus), listed(os.environ)).ordinal]
    use(gpu.ordinal)
    return gpu


def model(ordinal: int) -> str:
    """Return the product name of the GPU, such as NVIDIA H200."""
    name = runtime().getDeviceProperties(ordinal)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def free_bytes() -> int:
    """Return the free memory of the current GPU, in bytes."""
    return int(runtime().memGetInfo()[0])


def driver_cuda() -> int | None:
    """Return the driver's CUDA version, 12040 for 12.4; None where there is no driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value or None


_REMEDY = "look at `hpctrain doctor`, or take device = 'cpu'"


def _as_listed(listed: Sequence[str]) -> str:
    return f" ({VISIBLE} is {','.join(listed)})" if listed else ""


def _one_slice(listed: Sequence[str]) -> str:
    """Return a note if several MIG slices are listed, of which CUDA shows only the first."""
    if len(listed) < 2 or not listed[0].startswith("MIG-"):
        return ""
    return f", the first of {len(listed)} MIG slices: let the launcher give each rank its own"


def _visible() -> tuple[Gpu, ...]:
    cuda, words = runtime(), listed(os.environ)
    try:
        count = cuda.getDeviceCount()
    except cuda.CUDARuntimeError as error:
        raise HereError(_refused(str(error), cuda.runtimeGetVersion())) from None
    if not count:
        raise HereError(f"no GPU is visible{_as_listed(words)}; {_REMEDY}")
    return tuple(Gpu(i, _uuid(i, words), _address(cuda, i)) for i in range(count))


def cupy_module() -> Any:
    """Return the module `cupy`; raise UsageError that names the extra where there is none."""
    try:
        import cupy
    except ImportError as error:
        raise HereError(
            f"device = 'gpu' needs CuPy: pip install 'hpctrain[{_extra()}]'; seen: {error}"
        ) from None
    return cupy


def _refused(error: str, made_for: int) -> str:
    """Return the sentence about a CUDA that does not start, under a CuPy made for `made_for`."""
    driver = driver_cuda()
    if driver is None:
        return f"no GPU: this machine has no NVIDIA driver (libcuda.so.1); {_REMEDY}"
    if driver // 1000 < made_for // 1000:
        return (
            f"CuPy was made for CUDA {made_for // 1000}, and the driver brings {_dotted(driver)}: "
            f"pip uninstall cupy-cuda{made_for // 1000}x; pip install 'hpctrain[{_extra()}]'"
        )
    return f"CUDA finds no GPU ({error}){_as_listed(listed(os.environ))}; {_REMEDY}"


def _extra() -> str:
    return EXTRAS.get((driver_cuda() or 0) // 1000, EXTRAS[max(EXTRAS)])


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _uuid(ordinal: int, words: Sequence[str]) -> str:
    """Return the name of a GPU or MIG slice; CUDA has been started."""
    if ordinal < len(words) and words[ordinal].startswith("MIG-"):
        return words[ordinal]
    raw, device = (ctypes.c_ubyte * 16)(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
        failed = cuda.cuDeviceGet(ctypes.byref(device), ordinal) or get_uuid(raw, device)
    except (OSError, AttributeError):
        failed = True
    if failed:
        return f"GPU-number-{ordinal}"
    uuid_hex = bytes(raw).hex()
    return "GPU-" + "-".join(
        (uuid_hex[:8], uuid_hex[8:12], uuid_hex[12:16], uuid_hex[16:20], uuid_hex[20:])
    )


def _address(cuda: Any, ordinal: int) -> str:
    try:
        return pci.address(cuda.deviceGetPCIBusId(ordinal))
    except (cuda.CUDARuntimeError, ValueError):
        return ""
