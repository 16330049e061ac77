"""`mpiexec -n 2 python -m hpctrain.transport.mpi.hello`: MPI's size, threads, ULFM."""

from __future__ import annotations

import json
import os

import mpi4py

mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

FT = "OMPI_MCA_mpi_ft_enable"
LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}


def ulfm() -> bool:
    """Return whether ranks of this job can outlive a lost one."""
    # With ULFM off its functions exist all the same: Agree is then an all-reduce.
    return os.environ.get(FT, "0") in ("1", "true")


def level() -> str:
    """Return the thread level of MPI, which was started."""
    return LEVELS[MPI.Query_thread()]


def main() -> None:
    """Start MPI, print a line, and end it."""
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    facts = {"size": MPI.COMM_WORLD.size, "threads": level(), "ulfm": ulfm()}
    print(json.dumps(facts) + "\n", end="", flush=True)  # one write: ranks share the pipe
    MPI.Finalize()


if __name__ == "__main__":
    main()
