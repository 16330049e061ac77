"""Abnormal termination: a rank reports the cause, then the whole job is aborted.

If all ranks fail alike, each prints its traceback: the causes may differ. Three cases are reported
by one rank. An error that all ranks raise together, such as a wrong argument in a script, and a GPU
with too little memory, without a traceback: ranks wait in the order of their numbers, and the first
to report aborts the job. An error before MPI_Init: most likely all ranks have the same.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from hpctrain.core import launchers, rank_marks
from hpctrain.core.errors import (
    AGREED_ERRORS,
    BadSampleError,
    HereError,
    HungError,
    OwnRankError,
    UsageError,
    notes,
)
from hpctrain.core.launchers import Launched
from hpctrain.core.printing import printable, say
from hpctrain.core.xp import shortage
from hpctrain.transport.pace import Pace
from hpctrain.watch import HungReport, dump_stacks, write_report

log = logging.getLogger(__name__)
#: The time given to the first rank that reports a hang, or a lack of memory.
FIRST_REPORT_S = 3.0
FAULT_GROUPING_WINDOW_S = 0.5  #: in which every rank may print its error before one aborts the job
#: The time that other ranks wait for the report of rank 0 before MPI starts; the second where the
#: launcher ends all ranks at the first error.
RANK_0_S, LAUNCHER_S = 1.0, 10.0
OUTPUT_S = 1.0  #: the time given to the launcher to read a report
REPORT_SPREAD_S = 2.0  #: over which reports of the same error are spread, in its second half


def abort(code: int) -> NoReturn:
    """End the whole job at once with exit code `code`."""
    from hpctrain.transport.mpi import startup

    # An exception hook may collect the report to print it with a prefix, as PyTorch's does.
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        collected, sys.stderr = sys.stderr.getvalue(), sys.__stderr__
        _print(collected)

    startup.abort_job(code)


def refuse(error: BaseException, message: str, hint: str = "") -> int:
    """Report an error before MPI starts as `message`, from one rank; return the exit code."""
    job = launchers.launched(os.environ)
    if _reports(job, error):
        _print(with_prefix(": ".join(["hpctrain", *_rank_name(job)]), message) + hint)
        if job.name == "srun":  # -K1 exits with 143 if it had to kill a rank: let the others fail
            time.sleep(RANK_0_S)
    return UsageError.exit_code


def report_before_mpi(error: BaseException) -> None:
    """Print an error raised before MPI starts with its traceback; a UsageError from one rank."""
    job, name = launchers.launched(os.environ), list[str]()
    if isinstance(error, UsageError):
        if not _reports(job, error):
            return
        name = _rank_name(job)
    report(error, ", ".join([*name, "before MPI was started"]))


def with_prefix(prefix: str, message: str) -> str:
    """Return `message` with `prefix` before each line, except indented continuation lines."""
    lines = printable(message).splitlines()
    return "\n".join(line if line.startswith(" ") else f"{prefix}: {line}" for line in lines)


def _wait_for_rank_0(job: Launched) -> None:
    """Give rank 0 the time to report an error that most likely all ranks have.

    Open MPI and `srun -K1` kill all ranks when one ends with an error; SIGTERM ends this rank with
    our own exit code.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(UsageError.exit_code))
    if job.rank > 0:
        time.sleep(LAUNCHER_S if job.name in ("openmpi", "srun") else RANK_0_S)


def _reports(job: Launched, error: BaseException) -> bool:
    """Return whether this rank reports an error raised before MPI_Init, after waiting for rank 0.

    Rank 0 does. A rank that Open MPI leaves running was the only one in error. The first rank of a
    host reports an error specific to the host; an error of this rank alone is reported without a
    wait.
    """
    if isinstance(error, OwnRankError):
        return True
    _wait_for_rank_0(job)
    of_host = isinstance(error, HereError) or isinstance(error.__context__, OSError)
    return job.rank == 0 or job.name == "openmpi" or (of_host and job.local_rank == 0)


def _rank_name(job: Launched) -> list[str]:
    """Return the name of this rank for its report; none for rank 0, which speaks for all."""
    return [f"rank {job.rank} on {socket.gethostname()}"] if job.rank > 0 else []


def report_agreed(error: BaseException) -> None:
    """Print an error that all ranks raise together, without a traceback."""
    message = with_prefix("hpctrain", "\n".join([str(error), *notes(error)]))
    say(message, err=True)


def report(error: BaseException, prefix: str, rank: int = 0, size: int = 1) -> None:
    """Print on stderr the error that ended `rank` of `size`; after that it may abort the job."""
    memory_error = shortage(error)
    if memory_error is not None or isinstance(error, AGREED_ERRORS):
        time.sleep(REPORT_SPREAD_S * (1 + rank / size) / 2 if rank > 0 else 0)
    if memory_error is not None:
        _print(f"hpctrain: {prefix}: {memory_error}" if size > 1 else f"hpctrain: {memory_error}")
        log.debug("the allocation that failed:", exc_info=error)
        return
    if isinstance(error, BadSampleError):
        lines = [str(error), *notes(error)]
    else:
        lines = "".join(traceback.format_exception(error)).splitlines()
        lines += notes(error) if sys.version_info < (3, 11) else []  # later ones add them
    _print("\n".join(f"[{prefix}] {line}" for line in lines))
    time.sleep(FAULT_GROUPING_WINDOW_S if size > 1 else 0)


def report_loss(text: str, position: int) -> None:
    """Print `text` on lost ranks, unless a rank left before this one, by `position`, ends the job.

    `position`: of this rank among those that are left.
    """
    time.sleep(REPORT_SPREAD_S / 2 * (position > 0))
    _print(text)


def report_hang(rank: int, run: Path | None, report: HungReport) -> None:
    """Report a hang, in folder `run` if there is one, and abort the job; called on every rank.

    The job is aborted even if the report fails: the other ranks wait for it.
    """
    try:
        if run is not None:
            dump_stacks(run / "watch" / f"stacks-{rank:05d}.txt")
        if run is None or write_report(run / "watch", report):
            _write_hang(run, report.text)
        else:
            time.sleep(FIRST_REPORT_S)
    finally:
        abort(HungError.exit_code)


def _write_hang(run: Path | None, text: str) -> None:
    """Print the report and the last lines at once: launchers drop output that an abort follows."""
    if run is None:
        _print(text)
    else:  # a run has imported these
        from hpctrain.core.run_files import run_folder
        from hpctrain.core.run_files.last_lines import last_lines

        _print("\n".join([text, *last_lines(run)]))
        summary = {"status": "hung", "exit_code": HungError.exit_code, "reason": text}
        run_folder.write_summary(run, summary)


def _print(text: str) -> None:
    """Print on stderr and wait until the launcher has read it: it drops output after an abort."""
    say(text, err=True)
    with contextlib.suppress(OSError, ValueError):  # not a pipe; TimeoutError is an OSError
        pipe = sys.stderr.fileno()
        Pace.of_naps(0.005, OUTPUT_S).until(lambda: not rank_marks.unread_bytes(pipe))
