"""How a job ends before its time: at once, on all ranks, after somebody has said why.

Where all ranks fail alike, each shows where: the causes may differ. Not so where a GPU has too
little memory, which is said in one line, and by one rank: they speak in the order of their ranks,
and whoever has spoken ends the job. Nor before MPI has started: what is wrong then, most likely all
have seen.
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

from hpctrain import launchers, rundir
from hpctrain.errors import HereError, HungError, UsageError, notes, printable
from hpctrain.resume import last_lines
from hpctrain.watch import dump_stacks, write_report
from hpctrain.xp import shortage

log = logging.getLogger(__name__)
#: How long whoever is first to report a hang, or a want of memory, is given to say so.
SPEAK_FIRST_S = 3.0
SAME_FAULT_S = 0.5  #: in which every rank may say what it has seen before one ends the job
#: How long ranks that need not speak wait for rank 0 before MPI starts.
REFUSED_S, ALONE_S = 1.0, 10.0
IN_TURN_S = 2.0  #: in which all ranks speak that are short of memory, one after the other


def abort(code: int) -> None:
    """End the whole job at once with exit code `code`."""
    from hpctrain.transport import mpi

    mpi.abort(code)


def refuse(error: BaseException, message: str, hint: str = "") -> int:
    """Say, before MPI starts, what is wrong; return the exit code."""
    who = refuser(error)
    if who is not None:
        _print(signed("hpctrain" + f": {who}" * bool(who), message) + hint)
        _let_others_speak()
    return UsageError.exit_code


def signed(who: str, message: str) -> str:
    """Return `message` with `who` before each of its lines, but those that only go on."""
    lines = printable(message).splitlines()
    return "\n".join(line if line.startswith(" ") else f"{who}: {line}" for line in lines)


def refuser(error: BaseException) -> str | None:
    """Return how this rank calls itself when it says what it refused before MPI started.

    Rank 0 needs no name. The others give it the time to speak: Open MPI and `srun -K1` kill all
    when one ends with an error, and whom Open MPI lets live was wrong alone. None: there is nothing
    to add. What is missing on a host, its first rank says.
    """
    here = launchers.launched(os.environ)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(UsageError.exit_code))  # see below
    if here.rank == 0:
        return ""
    time.sleep(ALONE_S if here.name in ("openmpi", "srun") else REFUSED_S)
    of_host = isinstance(error, HereError) or isinstance(error.__context__, OSError)
    if here.name != "openmpi" and not (of_host and here.local_rank == 0):
        return None
    return f"rank {here.rank} on {socket.gethostname()}"


def _let_others_speak() -> None:
    """Give other ranks the time to refuse as well, once this one has said why.

    `srun -K1` ends with 143 where it had to kill a rank that knew of nothing; one that has refused
    ends with our own code.
    """
    if launchers.launched(os.environ).name == "srun":
        time.sleep(REFUSED_S)


def say(error: BaseException, who: str, rank: int = 0, size: int = 1) -> None:
    """Say on stderr what has ended `rank` of `size`, called `who`; then it may end the job."""
    short = shortage(error)
    if short is not None:
        time.sleep(IN_TURN_S * rank / size)
        _print(f"hpctrain: {who}: {short}" if size > 1 else f"hpctrain: {short}")
        log.debug("where it was asked for:", exc_info=error)
        return
    lines = "".join(traceback.format_exception(error)).splitlines()
    lines += notes(error) if sys.version_info < (3, 11) else []  # later ones add them
    _print("\n".join(f"[{who}] {line}" for line in lines))
    time.sleep(SAME_FAULT_S if size > 1 else 0)


def hung(rank: int, run: Path | None, report: str) -> None:
    """Report a hang, in folder `run` if there is one, and end the job; called on every rank.

    It ends whatever goes wrong on the way: the others wait for it.
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
    told = {"status": "hung", "exit_code": HungError.exit_code, "reason": report}
    if run is not None:
        rundir.write_summary(run, told)
        _print("\n".join(last_lines(run)))


def _print(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
