"""Claim: UCX from the package index makes an MPI from the package index take device pointers.

    pip install libucx-cu13
    python benchmarks/gpu/ucx_swap.py [--ucx FOLDER/libucx/lib]

Two ranks send device memory to each other, under the MPI as it is and under another UCX. Needs a C
compiler and no GPU: the driver is a stand-in whose device pointers lead nowhere, so that an MPI
which touches them crashes as it would on a GPU. On a GPU `hpctrain doctor` tries the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from _common import keep

from hpctrain.cluster.launch import build_command, find_mpi
from hpctrain.core import launchers
from hpctrain.machine import facts

HERE = Path(__file__).parent
SIZES = (1, 1000, 1 << 16, 1 << 22, 1 << 26)
STAND_INS = {"libcuda.so.1": "stand_in_driver.c", "libnvidia-ml.so.1": "stand_in_nvml.c"}
LIMIT_S = 60
#: what each MPI wants besides another UCX
WAYS: Mapping[str, Mapping[str, str]] = {
    "Open MPI": {"OMPI_MCA_pml": "ucx"},
    # The way inside a node that MPICH has of its own knows no GPU: everything goes by UCX.
    "MPICH": {"MPIR_CVAR_NOLOCAL": "1"},
}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ucx", type=Path, default=None, help="the folder lib of libucx")
    parser.add_argument("--pair", help="what this script calls its ranks with")
    given = parser.parse_args()
    if given.pair:
        return pair()
    ucx, mpi = given.ucx or installed(), find_mpi()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        swapped = {"LD_LIBRARY_PATH": f"{ucx}:{folder}", "UCX_MEMTYPE_CACHE": "n"}
        ways = {
            "as it is": {"LD_LIBRARY_PATH": folder},
            "another UCX": swapped,
            "another UCX, selected": {**swapped, **WAYS.get(mpi.vendor, {})},
        }
        rows = [tried(mpi, way, variables) for way, variables in ways.items()]
    claims = {
        f"{mpi.vendor} {mpi.version} as it is crashes on a device pointer": rows[0]["crashed"],
        f"with another UCX and {dict(WAYS[mpi.vendor])} all {len(SIZES)} sizes arrive": (
            rows[2]["right"] == len(SIZES)
        ),
        "64 KiB and more are moved once, from device to device": (
            rows[2]["moved_per_byte"] is not None and rows[2]["moved_per_byte"] == 1.0
        ),
    }
    keep("ucx_swap", {"machine": facts(("here",), "mpi"), "driver": "stand-in"}, rows, claims)
    sys.exit(not all(claims.values()))


def installed() -> Path:
    """Return the folder of the libraries of libucx-cu13 or libucx-cu12."""
    found = find_spec("libucx")
    if found is None or found.origin is None:
        sys.exit("no libucx here: pip install libucx-cu13, or give --ucx FOLDER")
    return Path(found.origin).parent / "lib"


def build(folder: Path) -> None:
    """Compile the stand-ins."""
    for library, source in STAND_INS.items():
        # UCX patches the functions that allocate: they must be long enough to be patched.
        flags = ["-w", "-O1", "-falign-functions=64", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
        subprocess.run(["cc", *flags, "-o", folder / library, HERE / source, "-ldl"], check=True)


def tried(mpi: Any, way: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return how the ranks fared under these variables."""
    line, extra = build_command(
        mpi, 2, [sys.executable, __file__, "--pair", "1"], oversubscribed=True, as_root=True
    )
    done = subprocess.run(
        line,
        env={**launchers.without_rank_variables(os.environ), **extra, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    said = [json.loads(one) for one in done.stdout.splitlines() if one.startswith('{"bytes"')]
    long = [one["moved"] / one["bytes"] for one in said if one["bytes"] >= 1 << 16]
    return {
        "way": way,
        "variables": {k: v for k, v in variables.items() if k != "LD_LIBRARY_PATH"},
        "right": sum(one["right"] for one in said),
        "moved_per_byte": float(np.mean(long)) if long else None,
        "crashed": done.returncode != 0 and not said,
        "ucx": said[-1]["ucx"] if said else "",
    }


def pair() -> None:
    """Exchange device memory with the other rank; rank 0 says what arrived."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    driver = ctypes.CDLL("libcuda.so.1")
    driver.stand_in_malloc.restype = driver.stand_in_moved.restype = ctypes.c_uint64
    driver.stand_in_malloc.argtypes = [ctypes.c_size_t]
    driver.stand_in_copy.argtypes = [ctypes.c_uint64] * 3
    MPI.Init()
    comm, peer = MPI.COMM_WORLD, 1 - MPI.COMM_WORLD.rank
    for nbytes in SIZES:
        mine, inbox = (driver.stand_in_malloc(max(nbytes, 4096)) for _ in range(2))
        x, y = values(comm.rank, nbytes), np.zeros(nbytes, np.uint8)
        driver.stand_in_copy(mine, x.ctypes.data, nbytes)
        before = driver.stand_in_moved()
        out, into = ([MPI.memory.fromaddress(p, nbytes), nbytes, MPI.BYTE] for p in (mine, inbox))
        comm.Sendrecv(out, peer, 0, into, peer, 0)
        moved = driver.stand_in_moved() - before
        driver.stand_in_copy(y.ctypes.data, inbox, nbytes)
        right = all(comm.allgather(bool((y == values(peer, nbytes)).all())))
        if comm.rank == 0:
            row = {"bytes": nbytes, "right": right, "moved": moved, "ucx": mapped_ucx()}
            print(json.dumps(row), flush=True)
    MPI.Finalize()


def values(rank: int, nbytes: int) -> np.ndarray:
    return (np.arange(nbytes) * 31 % 251 + 1 + rank).astype(np.uint8)


def mapped_ucx() -> str:
    """Return the version of the UCX in this process, and whether it has CUDA."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libuc" in line}
    ucp = next((path for path in paths if Path(path).name.startswith("libucp")), "")
    if not ucp:
        return "none"
    library = ctypes.CDLL(ucp)
    library.ucp_get_version_string.restype = ctypes.c_char_p
    cuda = any(Path(path).name.startswith("libuct_cuda") for path in paths)
    return f"{library.ucp_get_version_string().decode()} {'with' if cuda else 'without'} CUDA"


if __name__ == "__main__":
    main()
