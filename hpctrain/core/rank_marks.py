"""Marks by which each rank of a job tells `hpctrain launch` its start of MPI and its end.

    launch <==== stderr of all ranks ==== mpiexec --- rank_marks.py --- the rank
      |                                               "ended -9"        "starts-mpi", "has-mpi" ...
      '--- removes the marks from the output: cluster/rank_states.py

The mpiexec of an elastic job ends with 0 although all ranks were killed, and waits for ever for a
rank that was killed in MPI_Init; the mpiexec of MPICH ends with 0 although all ranks left a running
MPI without a word. Run as a file, this module starts the rank, waits for its end and marks it:
`python -I -S rank_marks.py PROGRAM ARGUMENTS`. It ends as the rank did: with the same code, or by
the same signal. If it is killed itself, the kernel kills the rank.

It imports only the standard library: it starts in 20 ms and takes 10 MB.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import sys
import termios
import time
from contextlib import suppress
from typing import NoReturn

#: The variable with a descriptor of the rank's stderr, and the number of its file: a program may
#: have closed it, and opened another file.
VARIABLE = "HPCTRAIN_RANK_MARKS"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
#: HAS_MPI: other ranks watch this one. FINISHES: it does not leave without a word. LOSES: it takes
#: the rank of that number, as of a dead host, for lost.
STARTS_MPI, HAS_MPI, FINISHES = "starts-mpi", "has-mpi", "finishes"
ABORTS, ENDED, LOSES = "aborts", "ended", "loses"
MARK = "\x1ehpctrain rank {} {} {}\n"  # a line: mpiexec keeps back what is none
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
_DRAIN_S = 1.0  #: given to mpiexec to read earlier output, so that it passes on a mark whole
_PR_SET_PDEATHSIG = 1
_EXIT_NO_PROGRAM = 127


def write_mark(event: str, value: int = 0) -> None:
    """Write the mark of an `event` of this rank; nothing if the launcher does not read marks."""
    descriptor, _, inode = os.environ.get(VARIABLE, "").partition(" ")
    with suppress(OSError, ValueError):
        if inode == str(os.fstat(int(descriptor)).st_ino):
            _write(int(descriptor), event, value)


def _write(descriptor: int, event: str, value: int) -> None:
    deadline = time.monotonic() + _DRAIN_S
    with suppress(OSError):  # not a pipe
        while unread_bytes(descriptor) and time.monotonic() < deadline:
            time.sleep(0.005)
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    os.write(descriptor, MARK.format(rank, event, value).encode())


def unread_bytes(pipe: int) -> int:
    """Return the number of bytes in `pipe` that its reader has not read; OSError for no pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel send signal `number` to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def main() -> NoReturn:
    """Run a rank to its end, mark the end, and end alike."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("hpctrain-rank")  # what `top` shows
    descriptor = os.dup(2)
    os.set_inheritable(descriptor, True)  # noqa: FBT003  (positional only)
    os.environ[VARIABLE] = f"{descriptor} {os.fstat(descriptor).st_ino}"
    # The launcher's signals reach the whole process group, the rank too: here they end nothing.
    signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(signal.SIGKILL)
        _execute_program(sys.argv[1:], parent, signal_mask)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    write_mark(ENDED, exit_code)
    if exit_code >= 0:
        os._exit(exit_code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one
    with suppress(OSError):  # SIGKILL has no other disposition
        signal.signal(-exit_code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
    os.kill(parent, -exit_code)
    os._exit(128 - exit_code)


def _execute_program(argv: list[str], parent: int, mask: set[int | signal.Signals]) -> NoReturn:
    """Replace this process by the program `argv`, with the signals that launch's ranks have."""
    if os.getppid() != parent:  # it was killed before the kernel was asked
        os._exit(128 + signal.SIGKILL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"hpctrain: {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(_EXIT_NO_PROGRAM)


if __name__ == "__main__":
    main()
