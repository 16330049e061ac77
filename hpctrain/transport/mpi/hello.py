"""Size, thread level and ULFM of MPI: `mpiexec -n 2 python -m hpctrain.transport.mpi.hello`."""

from __future__ import annotations

import json

import mpi4py

mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

from hpctrain.core.printing import say  # noqa: E402
from hpctrain.transport.mpi.fault_tolerance import has_ulfm  # noqa: E402

THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}


def thread_level() -> str:
    """Return the thread level of the running MPI."""
    return THREAD_LEVELS[MPI.Query_thread()]


def main() -> None:
    """Start MPI, print the facts as a line of JSON, and finalize MPI."""
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    facts = {"size": MPI.COMM_WORLD.size, "threads": thread_level(), "ulfm": has_ulfm()}
    say(json.dumps(facts))  # one write: ranks share the pipe
    MPI.Finalize()


if __name__ == "__main__":
    main()
