"""A rank of benchmarks/survival.py: it trains as `hpctrain` does, and logs when each step is done.

Started with a recipe's arguments it is `hpctrain` itself; with `bare` it only makes MPI's
all-reduce of 4 bytes after each sleep of 10 ms, and after a loss MPI's Revoke and Shrink.
Every event is one write of 24 bytes to a file of this process: kind, seconds, step. The clock
(CLOCK_MONOTONIC) is common to the processes of a machine.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EVENT = struct.Struct("<qdq")
START, STEP, LOST, REGROUPED, CONTINUED = range(5)
FOLDER = "HPCTRAIN_SURVIVAL_EVENTS"
BARE_STEP_S = 0.01


class EventLog:
    """The events of this process; a SIGKILL loses none that was written."""

    def __init__(self, folder: str):
        self._file = (Path(folder) / str(os.getpid())).open("ab", buffering=0)

    def write(self, kind: int, step: int = 0) -> None:
        self._file.write(EVENT.pack(kind, time.monotonic(), step))


def main() -> None:
    log = EventLog(os.environ[FOLDER])
    log.write(START, int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    if sys.argv[1:] == ["bare"]:
        bare(log)
    else:
        train(log)


def train(log: EventLog) -> None:
    """Run `hpctrain`, of which some methods log that they were called."""
    from hpctrain.__main__ import main as hpctrain_main
    from hpctrain.training.journal import Journal
    from hpctrain.training.survival import survival

    wrap(Journal, "step", after=lambda _, step, __: log.write(STEP, step))
    wrap(survival.Survival, "log_recovery", before=lambda _, step: log.write(CONTINUED, step))
    wrap(survival, "survive", lambda _: log.write(LOST), lambda _: log.write(REGROUPED))
    hpctrain_main()


def wrap(
    owner: Any,
    name: str,
    before: Callable[..., object] = lambda *_: None,
    after: Callable[..., object] = lambda *_: None,
) -> None:
    """Let a function of a class or module call `before` and `after` with its arguments."""
    function = getattr(owner, name)

    def logged(*arguments: Any) -> Any:
        before(*arguments)
        result = function(*arguments)
        after(*arguments)
        return result

    setattr(owner, name, logged)


def bare(log: EventLog) -> None:
    """Reduce 4 bytes per step; after a loss revoke, shrink and reduce again."""
    import numpy as np
    from mpi4py import MPI

    comm, number, step = MPI.COMM_WORLD.Dup(), np.zeros(1, np.float32), 0
    while True:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            time.sleep(BARE_STEP_S)
            comm.Allreduce(MPI.IN_PLACE, number)
        except MPI.Exception:
            log.write(LOST)
            comm.Revoke()
            comm = comm.Shrink()
            log.write(REGROUPED)
            log.write(CONTINUED, step)
            continue
        step += 1
        log.write(STEP, step)


if __name__ == "__main__":
    main()
