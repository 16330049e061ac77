"""Every rank whose environment has ENDS, "MOMENT HOW RANKS", is lost at that moment.

Python imports this module before anything else, in each rank and nowhere else: a launcher has no
variable with a rank. `exit` leaves without a word, as `os._exit(0)` in a user's code.
"""

from __future__ import annotations

import atexit
import builtins
import os
import signal
import time
from pathlib import Path

RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
RANK = next((int(os.environ[name]) for name in RANKS if name in os.environ), None)
MOMENT, HOW, VICTIMS = (os.environ.get("ENDS", "") + "  ").split(" ")[:3]
VICTIM = (
    RANK is not None and str(RANK) in VICTIMS.split(",") and "HPCTRAIN_RESTARTS" not in os.environ
)
#: Whether the other ranks wait to their limit: nothing ends, and no message is sent.
WAITS = HOW in ("STOP", "exit") and MOMENT in ("exec", "init", "begun")
LIMIT_S = 6.0  #: of the start of MPI, if they wait
INSIDE_S = 0.3  #: after which a rank is inside MPI_Init
LATE_S = 1.0  #: after which the others are: so that it cannot have left


def at(moment: str) -> None:
    """Note that the rank has come to `moment`, and be lost if it is to be lost there."""
    if RANK is None or moment != MOMENT:
        return
    Path(os.environ["ENDS_SEEN"], f"{moment}-{RANK}").touch()
    if VICTIM:
        leave()
    elif not VICTIMS:  # the launcher is hit
        time.sleep(LATE_S)


def leave() -> None:
    if HOW == "exit":
        os._exit(0)
    os.kill(os.getpid(), signal.Signals[f"SIG{HOW}"])


def watch_start() -> None:
    """Come to `init` inside of MPI_Init, and to `begun` after it."""
    from hpctrain.core import rank_marks

    write = rank_marks.write_mark

    def write_mark(event: str, value: int = 0) -> None:
        write(event, value)
        if event == rank_marks.HAS_MPI:
            at("begun")
        elif event == rank_marks.STARTS_MPI and MOMENT == "init":
            if not VICTIM or HOW == "exit":
                at("init")
                time.sleep(LATE_S)
            elif os.fork() == 0:
                time.sleep(INSIDE_S)
                os.kill(os.getppid(), signal.Signals[f"SIG{HOW}"])
                os._exit(0)
            elif len(VICTIMS) > len("0,1"):  # all: the last one never comes
                time.sleep(LATE_S * (RANK == 2))

    rank_marks.write_mark = write_mark


def limit_start() -> None:
    """Let ranks wait for LIMIT_S in the start of MPI, instead of for one to five minutes."""
    original = builtins.__import__

    def import_(name: str, *args: object, **keys: object) -> object:
        module = original(name, *args, **keys)
        if name.startswith("hpctrain.transport.mpi"):
            import sys

            if limit := sys.modules.get("hpctrain.transport.mpi.init_limit"):
                start = getattr(limit, "_start", None)
                if start is not None and not hasattr(limit, "is_short"):
                    limit.is_short = True
                    limit._start = lambda s, *rest: start(s % 60 + LIMIT_S, *rest)
        return module

    builtins.__import__ = import_


class Callback:
    """The moments `step` and `end` of a run."""

    def on_row(self, row: dict) -> None:
        if row["step"] == 3:
            at("step")

    def on_end(self, summary: dict) -> None:
        at("end")


def program() -> None:
    """A script that goes through all moments without a run."""
    import numpy as np

    import hpctrain as ht

    ht.init("cpu", timeout_s=LIMIT_S if WAITS else 300.0)
    for step in range(6):
        if step == 3:
            at("step")
        ht.allreduce(np.ones(4))
    at("end")


if RANK is not None and MOMENT:
    atexit.register(at, "after")  # the first one: it runs last
    at("exec")
    watch_start()
    if WAITS:
        limit_start()
