"""A job over MPI with ULFM, whose ranks observe each other; one of its ranks or hosts is lost.

python survivors.py FOLDER stop|cut RANK: each survivor writes its error class and the ranks left.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hpctrain as ht

FOLDER, LOSS, VICTIM = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def write(name: str, text: str) -> None:
    (FOLDER / f".{name}").write_text(text)
    (FOLDER / f".{name}").rename(FOLDER / name)


def exchange(comm) -> None:
    """Make each rank wait for all others."""
    x, y = np.zeros(64), np.zeros(64)
    for _ in range(comm.size):
        comm.Sendrecv(x, (comm.rank + 1) % comm.size, 0, y, (comm.rank - 1) % comm.size, 0)


def lose(step: int) -> None:
    if step == 100:
        write("lost", "")
        if LOSS == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        os.system("ip link set lab down")


class CutOff(logging.Handler):
    """Writes the reason for which this host ends itself."""

    def emit(self, record: logging.LogRecord) -> None:
        write(f"cut-off-{world.rank}", record.getMessage())


logging.getLogger("hpctrain.world.watches").addHandler(CutOff(logging.CRITICAL))
world = ht.init()
from mpi4py import MPI  # noqa: E402

comm = MPI.COMM_WORLD.Dup()
comm.Set_errhandler(MPI.ERRORS_RETURN)
try:
    for step in range(10_000):
        exchange(comm)
        time.sleep(0.005)
        if world.rank == VICTIM:
            lose(step)
except MPI.Exception:
    comm.Revoke()
    survivors = comm.Shrink()
    exchange(survivors)
    write(f"survivor-{world.rank}", f"{survivors.size}")
    survivors.Barrier()
os._exit(0)
