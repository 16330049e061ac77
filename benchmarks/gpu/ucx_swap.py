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
from lib.common import save_result

from hpctrain.cluster.launch import build_command, find_mpi
from hpctrain.core import launchers
from hpctrain.transport.machine import facts

SCRIPTS = Path(__file__).parent
SIZES = (1, 1000, 1 << 16, 1 << 22, 1 << 26)
STAND_INS = {"libcuda.so.1": "stand_in_driver.c", "libnvidia-ml.so.1": "stand_in_nvml.c"}
LIMIT_S = 60
#: what each MPI wants besides another UCX
MPI_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "Open MPI": {"OMPI_MCA_pml": "ucx"},
    # The way inside a node that MPICH has of its own knows no GPU: everything goes by UCX.
    "MPICH": {"MPIR_CVAR_NOLOCAL": "1"},
}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ucx", type=Path, default=None, help="the folder lib of libucx")
    parser.add_argument("--pair", help="what this script calls its ranks with")
    options = parser.parse_args()
    if options.pair:
        return exchange_messages()
    ucx, mpi = options.ucx or find_libucx(), find_mpi()
    with tempfile.TemporaryDirectory() as folder:
        build_stand_ins(Path(folder))
        ucx_variables = {"LD_LIBRARY_PATH": f"{ucx}:{folder}", "UCX_MEMTYPE_CACHE": "n"}
        ways = {
            "as it is": {"LD_LIBRARY_PATH": folder},
            "another UCX": ucx_variables,
            "another UCX, selected": {**ucx_variables, **MPI_VARIABLES.get(mpi.vendor, {})},
        }
        rows = [run_ranks(mpi, way, variables) for way, variables in ways.items()]
    claims = {
        f"{mpi.vendor} {mpi.version} as it is crashes on a device pointer": rows[0]["crashed"],
        f"with another UCX and {dict(MPI_VARIABLES[mpi.vendor])} all {len(SIZES)} sizes arrive": (
            rows[2]["right"] == len(SIZES)
        ),
        "64 KiB and more are moved once, from device to device": (
            rows[2]["moved_per_byte"] is not None and rows[2]["moved_per_byte"] == 1.0
        ),
    }
    save_result(
        "ucx_swap", {"machine": facts(("here",), "mpi"), "driver": "stand-in"}, rows, claims
    )
    sys.exit(not all(claims.values()))


def find_libucx() -> Path:
    """Return the folder of the libraries of libucx-cu13 or libucx-cu12."""
    spec = find_spec("libucx")
    if spec is None or spec.origin is None:
        sys.exit("no libucx here: pip install libucx-cu13, or give --ucx FOLDER")
    return Path(spec.origin).parent / "lib"


def build_stand_ins(folder: Path) -> None:
    """Compile the stand-ins."""
    for library, source in STAND_INS.items():
        # UCX patches the functions that allocate: they must be long enough to be patched.
        flags = ["-w", "-O1", "-falign-functions=64", "-shared", "-fPIC", f"-Wl,-soname,{library}"]
        subprocess.run(["cc", *flags, "-o", folder / library, SCRIPTS / source, "-ldl"], check=True)


def run_ranks(mpi: Any, way: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return how the ranks fared under these variables."""
    line, extra = build_command(
        mpi, 2, [sys.executable, __file__, "--pair", "1"], oversubscribed=True, as_root=True
    )
    process = subprocess.run(
        line,
        env={**launchers.without_rank_variables(os.environ), **extra, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    messages = [
        json.loads(message)
        for message in process.stdout.splitlines()
        if message.startswith('{"bytes"')
    ]
    moved_per_byte = [
        message["moved"] / message["bytes"] for message in messages if message["bytes"] >= 1 << 16
    ]
    return {
        "way": way,
        "variables": {k: v for k, v in variables.items() if k != "LD_LIBRARY_PATH"},
        "right": sum(message["right"] for message in messages),
        "moved_per_byte": float(np.mean(moved_per_byte)) if moved_per_byte else None,
        "crashed": process.returncode != 0 and not messages,
        "ucx": messages[-1]["ucx"] if messages else "",
    }


def exchange_messages() -> None:
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
        send_buffer, inbox = (driver.stand_in_malloc(max(nbytes, 4096)) for _ in range(2))
        x, y = test_values(comm.rank, nbytes), np.zeros(nbytes, np.uint8)
        driver.stand_in_copy(send_buffer, x.ctypes.data, nbytes)
        moved_before = driver.stand_in_moved()
        send_spec, receive_spec = (
            [MPI.memory.fromaddress(p, nbytes), nbytes, MPI.BYTE] for p in (send_buffer, inbox)
        )
        comm.Sendrecv(send_spec, peer, 0, receive_spec, peer, 0)
        moved = driver.stand_in_moved() - moved_before
        driver.stand_in_copy(y.ctypes.data, inbox, nbytes)
        is_correct = all(comm.allgather(bool((y == test_values(peer, nbytes)).all())))
        if comm.rank == 0:
            row = {"bytes": nbytes, "right": is_correct, "moved": moved, "ucx": ucx_version()}
            print(json.dumps(row), flush=True)
    MPI.Finalize()


def test_values(rank: int, nbytes: int) -> np.ndarray:
    return (np.arange(nbytes) * 31 % 251 + 1 + rank).astype(np.uint8)


def ucx_version() -> str:
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
