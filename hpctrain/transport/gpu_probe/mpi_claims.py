"""CUDA support as an MPI library reports it, and the settings that enable it; pure functions.

A report alone never enables device pointers: it may be wrong, and then a pointer is a segfault. It
serves to name the *reason* why a trial failed, and the remedy: first a vendor's variable that is
not set, then a part that the library lacks.

Sources: Open MPI's and UCX's documentation on CUDA; MPICH's MPIX_GPU_query_support and
MPIR_CVAR_ENABLE_GPU; Cray's intro_mpi(3) (MPICH_GPU_SUPPORT_ENABLED); MVAPICH2-GDR's user guide
(MV2_USE_CUDA); Intel's developer reference (I_MPI_OFFLOAD); ParaStation's PSP_CUDA.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: the kind of GPU in MPIX_GPU_query_support
_GPU_TYPE_CUDA = 0
_GPU_LIBRARIES = re.compile(r"/lib(mpi_gtl_cuda|uct_cuda|ucp|pscom\w*|fabric)[^/]*\.so[^/]*$")
#: Variables whose values a verdict depends on; all of UCX's count, too.
RELEVANT_VARIABLES = (
    "FI_HMEM_CUDA_ENABLE_XFER",
    "FI_PROVIDER",
    "I_MPI_OFFLOAD",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MPICH_GPU_SUPPORT_ENABLED",
    "MPIR_CVAR_CH4_NETMOD",
    "MPIR_CVAR_CH4_OFI_ENABLE_HMEM",
    "MPIR_CVAR_ENABLE_GPU",
    "MPIR_CVAR_NOLOCAL",
    "MV2_USE_CUDA",
    "OMPI_MCA_btl",
    "OMPI_MCA_opal_common_ucx_devices",
    "OMPI_MCA_opal_common_ucx_tls",
    "OMPI_MCA_pml",
    "PSP_CUDA",
)
_UCX_PREFIX, _LIBRARY_PATH = "UCX_", "LD_LIBRARY_PATH"


@dataclass(frozen=True)
class MpiClaims:
    """The CUDA support that a running MPI reports; None where it lacks the function."""

    vendor: str
    query_cuda: bool | None = None  #: MPIX_Query_cuda_support
    query_gpu: bool | None = None  #: MPIX_GPU_query_support
    alloc_kinds: str = ""  #: MPI 4.1's info key mpi_memory_alloc_kinds
    libraries: tuple[str, ...] = ()  #: libraries in this process that matter for GPU memory

    @property
    def reports_cuda(self) -> bool:
        """Whether a function of MPI reports CUDA support."""
        return bool(self.query_cuda or self.query_gpu or "cuda" in self.alloc_kinds)

    def has_library(self, name: str) -> bool:
        """Return whether a library whose name begins with `name` is loaded; "" always is."""
        return not name or any(Path(path).name.startswith(name) for path in self.libraries)


class CudaFault(NamedTuple):
    """The reason why an MPI takes no GPU memory, and the remedy."""

    reason: str
    remedy: str


class _EnablingVariable(NamedTuple):
    """A variable without which a vendor's MPI takes no device pointers."""

    vendors: tuple[str, ...]
    name: str
    requirements: str  #: other requirements
    identifying_library: str = ""  #: library that tells it from others of this vendor


_ENABLING_VARIABLES = (
    _EnablingVariable(
        ("Cray MPICH",), "MPICH_GPU_SUPPORT_ENABLED", "libmpi_gtl_cuda in the process"
    ),
    _EnablingVariable(("MVAPICH2", "MVAPICH"), "MV2_USE_CUDA", "a build for CUDA (MVAPICH2-GDR)"),
    _EnablingVariable(
        ("Intel MPI",), "I_MPI_OFFLOAD", "version 2021.9 or newer, and libfabric with CUDA"
    ),
    _EnablingVariable(
        ("MPICH",), "PSP_CUDA", "ParaStation's CUDA module (mpi-settings/CUDA)", "libpscom"
    ),
)


def query_claims(vendor: str, libmpi: str, alloc_kinds: str) -> MpiClaims:
    """Query the `libmpi` that this process has loaded; MPI must have been started."""
    library = ctypes.CDLL(libmpi)
    query = getattr(library, "MPIX_Query_cuda_support", None)
    cuda_support = None if query is None else bool(query())
    return MpiClaims(vendor, cuda_support, _query_gpu_support(library), alloc_kinds, _libraries())


def find_fault(claims: MpiClaims, environ: Mapping[str, str]) -> CudaFault:
    """Return the most likely reason why an MPI failed its trial, and the remedy."""
    return (
        _variable_fault(claims, environ)
        or _ucx_fault(environ)
        or _cray_fault(claims)
        or _mpich_fault(claims, environ)
        or _open_mpi_fault(claims)
        or CudaFault(
            f"{claims.vendor} reports support of device pointers, but fails",
            "the driver and what MPI or UCX were built for may not fit: tell the site; "
            "hpctrain does without",
        )
    )


def relevant_variables(environ: Mapping[str, str], libmpi: str) -> dict[str, str]:
    """Return the variables that a verdict depends on, equal inside and outside of a rank."""
    values = {
        name: value
        for name, value in sorted(environ.items())
        if name in RELEVANT_VARIABLES or name.startswith(_UCX_PREFIX)
    }
    # Open MPI's mpirun puts the folder of its own libraries in front, several times.
    mpi_folder = str(Path(libmpi).parent)
    folders = [
        folder
        for folder in values.get(_LIBRARY_PATH, "").split(":")
        if folder not in ("", mpi_folder)
    ]
    return values | {_LIBRARY_PATH: ":".join(folders)}


def _variable_fault(claims: MpiClaims, environ: Mapping[str, str]) -> CudaFault | None:
    for variable in _ENABLING_VARIABLES:
        is_disabled = environ.get(variable.name, "").lower() in ("", "0", "no", "off", "false")
        if (
            is_disabled
            and claims.vendor in variable.vendors
            and claims.has_library(variable.identifying_library)
        ):
            reason = f"{claims.vendor} takes device pointers only where {variable.name}=1 is set"
            return CudaFault(reason, f"export {variable.name}=1 (it needs {variable.requirements})")
    return None


def _ucx_fault(environ: Mapping[str, str]) -> CudaFault | None:
    """Return the fault of a UCX_TLS that names transports but none of CUDA."""
    transports = environ.get("UCX_TLS", "")
    if not transports or transports.startswith("^") or "cuda" in transports or transports == "all":
        return None
    return CudaFault(
        f"UCX_TLS={transports} leaves out UCX's CUDA transports",
        f"export UCX_TLS={transports},cuda_copy,cuda_ipc",
    )


def _cray_fault(claims: MpiClaims) -> CudaFault | None:
    if claims.vendor != "Cray MPICH" or claims.has_library("libmpi_gtl_cuda"):
        return None
    return CudaFault(
        "Cray MPICH's GPU layer, libmpi_gtl_cuda, is not in the process",
        "module load craype-accel-nvidia80 (or -nvidia90) and build mpi4py with it, or "
        "LD_PRELOAD libmpi_gtl_cuda.so",
    )


def _mpich_fault(claims: MpiClaims, environ: Mapping[str, str]) -> CudaFault | None:
    if claims.vendor not in ("MPICH", "MVAPICH", "MVAPICH2", "Intel MPI") or claims.reports_cuda:
        return None
    if environ.get("MPIR_CVAR_ENABLE_GPU") == "0":
        return CudaFault("MPIR_CVAR_ENABLE_GPU=0 is set", "unset MPIR_CVAR_ENABLE_GPU")
    if claims.has_library("libuct_cuda") and environ.get("MPIR_CVAR_NOLOCAL", "0") == "0":
        return CudaFault(
            "UCX knows GPUs, but inside a node MPICH takes a way of its own that does not",
            "export MPIR_CVAR_NOLOCAL=1",
        )
    return CudaFault(
        f"{claims.vendor} was built without CUDA (MPIX_GPU_query_support reports none)",
        "take the site's build for CUDA; MPICH: ./configure --with-cuda, or another UCX: "
        "docs/gpus.md, 'Open MPI from the package index'",
    )


def _open_mpi_fault(claims: MpiClaims) -> CudaFault | None:
    if claims.vendor != "Open MPI":
        return None
    if claims.has_library("libucp") and not claims.has_library("libuct_cuda"):
        return CudaFault(
            "the UCX that Open MPI loaded has no CUDA transports"
            + ("" if claims.reports_cuda else ", and Open MPI itself was built without CUDA"),
            "take the site's build for CUDA, or give it another UCX: docs/gpus.md, "
            "'Open MPI from the package index'",
        )
    if claims.reports_cuda:
        return None
    return CudaFault(
        "Open MPI was built without CUDA (MPIX_Query_cuda_support reports none)",
        "take the site's build for CUDA (`ompi_info | grep -i cuda`), or select UCX: "
        "OMPI_MCA_pml=ucx",
    )


def _query_gpu_support(library: ctypes.CDLL) -> bool | None:
    query, support = getattr(library, "MPIX_GPU_query_support", None), ctypes.c_int(0)
    if query is None or query(_GPU_TYPE_CUDA, ctypes.byref(support)):
        return None
    return bool(support.value)


def _libraries() -> tuple[str, ...]:
    return gpu_libraries(Path("/proc/self/maps").read_text().splitlines())


def gpu_libraries(maps: Sequence[str]) -> tuple[str, ...]:
    """Return the libraries that matter for GPU memory, from the lines of /proc/PID/maps."""
    paths = {line.split(maxsplit=5)[-1] for line in maps if "/" in line}
    return tuple(sorted(path for path in paths if _GPU_LIBRARIES.search(path)))
