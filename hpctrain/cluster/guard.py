"""End the ranks of `hpctrain launch` when launch itself dies, SIGKILL included.

    launch ==== pipe ====> guard      python -I -S guard.py JOB SEGMENTS
      |                      :
    mpiexec --> ranks     signals     all have HPCTRAIN_JOB=JOB in their environment

Nobody writes to the pipe. When launch dies the kernel closes it, and the guard reads its end: it
asks mpiexec for a stop, as launch does, so that the ranks save a checkpoint; after 4 s it sends
SIGTERM to processes that are left, and after 6.5 s SIGKILL. Ranks on other hosts are ended by
mpiexec. Then it removes the shared memory of which the ranks wrote into the descriptor SEGMENTS.

The guard is run as a file and needs the standard library alone: it starts in 20 ms and takes 9 MB.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

JOB = "HPCTRAIN_JOB"  #: the variable that marks all processes of a job
POLL_S = 0.05
#: mpiexec may just be about to start: where no process exists yet, the guard looks for so long.
START_S = 1.0
#: (seconds after launch's death, signal to all that are left)
SIGNALS = ((4.0, signal.SIGTERM), (6.5, signal.SIGKILL), (7.0, signal.SIGKILL))
LAST_S = 1.0  #: no process outlives SIGKILL for longer, but one that a file system holds


def main() -> None:
    """Wait for the end of launch; end its job."""
    job, segments = sys.argv[1], int(sys.argv[2])
    with open("/proc/self/comm", "w") as file:
        file.write("hpctrain-guard")  # what `top` shows
    os.read(0, 1)
    if pids := _await_members(job):
        print("hpctrain: launch was killed: its ranks are stopped", file=sys.stderr, flush=True)
        # Only to the roots of the job: mpiexec forwards the signal to the ranks.
        send([pid for pid in pids if _parent(pid) not in pids], signal.SIGUSR1)
        end_job(job, SIGNALS)
    remove(segments)


def remove(segments: int) -> None:
    """Remove the files of shared memory listed in a descriptor; see transport/mpi/segments.py.

    MPI libraries leave theirs where ranks were killed. A file that has the name of one of them, and
    is another, stays.
    """
    for line in os.pread(segments, os.fstat(segments).st_size, 0).decode().splitlines():
        inode, _, path = line.partition(" ")
        try:
            if os.stat(path).st_ino == int(inode):
                os.unlink(path)
        except OSError:  # its library has removed it
            continue


def members(job: str) -> list[int]:
    """Return the processes here that belong to `job`; zombies have no environment.

    Neither process group nor session holds them all: Hydra's proxies and PRRTE's ranks leave.
    """
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and _belongs_to_job(name, job)
    ]


def end_job(job: str, signals: Sequence[tuple[float, int]]) -> None:
    """Return when no process of `job` is left; send each of `signals` to all when it is due.

    Those that even the last one does not end within a second are left alone.
    """
    start = time.monotonic()
    for time_s, number in (*signals, (signals[-1][0] + LAST_S, 0)):
        while (pids := members(job)) and time.monotonic() < start + time_s:
            time.sleep(POLL_S)
        send(pids, number)


def send(pids: Sequence[int], number: int) -> None:
    """Send the signal `number` to those of `pids` that still run."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _await_members(job: str) -> list[int]:
    """Return the processes of `job`; also those of which the first is just being started."""
    deadline = time.monotonic() + START_S
    while not (pids := members(job)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return pids


def _belongs_to_job(pid: str, job: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{JOB}={job}".encode() in file.read().split(b"\0")
    except OSError:  # it has ended, or is not ours
        return False


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    main()
