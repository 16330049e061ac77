"""Abnormal termination: a rank reports the cause, then the whole job is aborted.

If all ranks fail alike, each prints its traceback: the causes may differ. Two cases are reported by
one rank, without a traceback. A GPU with too little memory: ranks wait in the order of their
numbers, and the first to report aborts the job. An error before MPI_Init: most likely all ranks
have the same.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from hpctrain.core import launchers
from hpctrain.core.errors import HereError, HungError, UsageError, notes, printable
from hpctrain.core.xp import shortage
from hpctrain.run_files import run_folder
from hpctrain.run_files.last_lines import last_lines
from hpctrain.watch import dump_stacks, write_report

log = logging.getLogger(__name__)
#: The time given to the first rank that reports a hang, or a lack of memory.
SPEAK_FIRST_S = 3.0
SAME_FAULT_S = 0.5  #: in which every rank may print its error before one aborts the job
#: The time that other ranks wait for the report of rank 0 before MPI starts.
REFUSED_S, ALONE_S = 1.0, 10.0
IN_TURN_S = 2.0  #: over which the reports of ranks short of memory are spread


def abort(code: int) -> None:
    """End the whole job at once with exit code `code`."""
    from hpctrain.transport.mpi import link as mpi_link

    mpi_link.abort(code)


def refuse(error: BaseException, message: str, hint: str = "") -> int:
    """Report an error before MPI starts; return the exit code."""
    prefix = refuser(error)
    if prefix is not None:
        _print(signed("hpctrain" + f": {prefix}" * bool(prefix), message) + hint)
        _let_others_speak()
    return UsageError.exit_code


def signed(prefix: str, message: str) -> str:
    """Return `message` with `prefix` before each line, except indented continuation lines."""
    lines = printable(message).splitlines()
    return "\n".join(line if line.startswith(" ") else f"{prefix}: {line}" for line in lines)


def refuser(error: BaseException) -> str | None:
    """Return the prefix for an error raised before MPI_Init; None if another rank reports it.

    Rank 0 has an empty prefix. The other ranks wait for its report: Open MPI and `srun -K1` kill
    all ranks when one ends with an error. A rank that Open MPI leaves running was the only one in
    error. An error specific to a host is reported by the first rank there.
    """
    job = launchers.launched(os.environ)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(UsageError.exit_code))  # see below
    if job.rank == 0:
        return ""
    time.sleep(ALONE_S if job.name in ("openmpi", "srun") else REFUSED_S)
    of_host = isinstance(error, HereError) or isinstance(error.__context__, OSError)
    if job.name != "openmpi" and not (of_host and job.local_rank == 0):
        return None
    return f"rank {job.rank} on {socket.gethostname()}"


def _let_others_speak() -> None:
    """Give other ranks the time to fail as well, after the report of this one.

    `srun -K1` exits with 143 if it had to kill a rank; a rank that has failed by itself exits with
    our own code.
    """
    if launchers.launched(os.environ).name == "srun":
        time.sleep(REFUSED_S)


def say(error: BaseException, prefix: str, rank: int = 0, size: int = 1) -> None:
    """Print on stderr the error that ended `rank` of `size`; after that it may abort the job."""
    short = shortage(error)
    if short is not None:
        time.sleep(IN_TURN_S * rank / size)
        _print(f"hpctrain: {prefix}: {short}" if size > 1 else f"hpctrain: {short}")
        log.debug("where it was asked for:", exc_info=error)
        return
    lines = "".join(traceback.format_exception(error)).splitlines()
    lines += notes(error) if sys.version_info < (3, 11) else []  # later ones add them
    _print("\n".join(f"[{prefix}] {line}" for line in lines))
    time.sleep(SAME_FAULT_S if size > 1 else 0)


def hung(rank: int, run: Path | None, report: str) -> None:
    """Report a hang, in folder `run` if there is one, and abort the job; called on every rank.

    The job is aborted even if the report fails: the other ranks wait for it.
    """
    try:
        if run is not None:
            dump_stacks(run / "watch" / f"stacks-{rank:05d}.txt")
        if run is None or write_report(run / "watch", report):
            _speak(run, report)
        else:
            time.sleep(SPEAK_FIRST_S)
    finally:
        abort(HungError.exit_code)


def _speak(run: Path | None, report: str) -> None:
    _print(report)
    summary = {"status": "hung", "exit_code": HungError.exit_code, "reason": report}
    if run is not None:
        run_folder.write_summary(run, summary)
        _print("\n".join(last_lines(run)))


def _print(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
