"""Facts of the machine for measurements: CPU, cores, MPI, versions."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import threadpoolctl

from hpctrain.transport.mpi.installation import load_mpi

PACKAGES = ("hpctrain", "numpy", "mpi4py")


def facts(hosts: Sequence[str], transport: str) -> dict[str, Any]:
    """Return the facts of the machine on which a result was measured.

    The World gives `hosts` and `transport`.
    """
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "cores_per_rank": len(os.sched_getaffinity(0)),
        "os": platform.platform(),
        "hosts": len(set(hosts)),
        "mpi": mpi() if transport == "mpi" else "none: threads",
        "blas_threads": blas_threads(),
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
    }


def cpu() -> str:
    """Return the CPU's model name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((s.split(":")[1].strip() for s in lines if s.startswith("model name")), "unknown")


def mpi() -> str:
    """Return vendor and version of the MPI that mpi4py loads."""
    loaded = load_mpi()
    return f"{loaded.vendor} {loaded.version}"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on; with CuPy's if it was used."""
    packages = (*PACKAGES, *(["cupy"] if "cupy" in sys.modules else []))
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


@cache  # each summary has it, and it takes reading all metadata of a package
def version(name: str) -> str:
    """Return the version of a package; ours may be on the path without being installed."""
    from importlib import metadata  # late: it takes as long to import as all collectives

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "unknown"))


def blas_threads() -> int:
    """Return the number of threads of BLAS in this rank."""
    pools = _libraries(len(sys.modules)).info()  # OpenMP's too: PyTorch brings its own
    return max((pool["num_threads"] for pool in pools if pool["user_api"] == "blas"), default=1)


@lru_cache(maxsize=1)
def _libraries(modules: int) -> threadpoolctl.ThreadpoolController:
    """Return the libraries with threads; cached by the number of `modules`: a search takes 4 ms."""
    return threadpoolctl.ThreadpoolController()
