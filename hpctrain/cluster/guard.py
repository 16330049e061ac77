"""End the ranks of `hpctrain launch` when launch itself dies, SIGKILL included.

    launch ==== pipe ====> guard      python -I -S guard.py JOB SEGMENTS
      |                      :
    mpiexec --> ranks     signals     all have HPCTRAIN_JOB=JOB in their environment

Nobody writes to the pipe. When launch dies, the kernel closes the pipe, and the guard reads
end-of-file. The guard asks mpiexec for a stop, as launch does, so that the ranks save a checkpoint.
It sends SIGTERM to the remaining processes after 4 s, and SIGKILL after 6.5 s. Ranks on other hosts
are ended by mpiexec. Finally the guard removes the shared-memory files that the ranks have listed
in the file descriptor SEGMENTS.

The guard runs as a file and imports only the standard library: it starts in 20 ms and takes 9 MB.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

JOB_VARIABLE = "HPCTRAIN_JOB"  #: the variable that marks all processes of a job
POLL_INTERVAL_S = 0.05
#: How long the guard waits for the first process of the job: mpiexec may be about to start.
START_TIMEOUT_S = 1.0
#: (seconds after launch's death, signal to all remaining processes)
SIGNAL_SCHEDULE = ((4.0, signal.SIGTERM), (6.5, signal.SIGKILL), (7.0, signal.SIGKILL))
FINAL_WAIT_S = 1.0  #: only a process blocked in a file system outlives SIGKILL for longer


def main() -> None:
    """Wait until launch ends, then end its job."""
    job, segments_fd = sys.argv[1], int(sys.argv[2])
    with open("/proc/self/comm", "w") as file:
        file.write("hpctrain-guard")  # what `top` shows
    os.read(0, 1)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (pids := find_pids(job)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    if pids:
        print("hpctrain: launch was killed: its ranks are stopped", file=sys.stderr, flush=True)
        # Only the root processes of the job get the signal: mpiexec forwards it to the ranks.
        send_signal([pid for pid in pids if _parent_pid(pid) not in pids], signal.SIGUSR1)
        end_job(job, SIGNAL_SCHEDULE)
    remove_segments(segments_fd)


def remove_segments(descriptor: int) -> None:
    """Remove the shared-memory files listed in a descriptor; see transport/mpi/segments.py.

    MPI libraries leave these files behind if their ranks are killed. A newer file of the same name
    has another inode, and stays. After a tab comes the path to which a file is copied first.
    """
    for line in os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode().splitlines():
        inode, _, paths = line.partition(" ")
        path, _, copy = paths.partition("\t")
        try:
            if os.stat(path).st_ino == int(inode):
                _copy_records(path, copy)
                os.unlink(path)
        except OSError:  # the MPI library has removed the file
            continue


def _copy_records(source: str, target: str) -> None:
    """Copy a file of records into the folder of its run, if that is there and not full."""
    try:
        if target and not os.path.islink(os.path.dirname(target)):
            with open(source, "rb") as records, open(target, "xb") as copy:  # never a link
                copy.write(records.read())
    except OSError:
        return


def find_pids(job: str) -> list[int]:
    """Return the ids of this host's processes that belong to `job`, without zombies.

    The environment identifies them, since Hydra's proxies and PRRTE's ranks leave the process group
    and the session of mpiexec.
    """
    return [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and has_variable(name, f"{JOB_VARIABLE}={job}")
    ]


def end_job(job: str, signals: Sequence[tuple[float, int]]) -> None:
    """Send each of `signals` to all processes of `job` when it is due; return when all have ended.

    Also return if a process is still alive a second after the last signal.
    """
    start = time.monotonic()
    for time_s, signal_number in (*signals, (signals[-1][0] + FINAL_WAIT_S, 0)):
        while (pids := find_pids(job)) and time.monotonic() < start + time_s:
            time.sleep(POLL_INTERVAL_S)
        send_signal(pids, signal_number)


def send_signal(pids: Sequence[int], signal_number: int) -> None:
    """Send a signal to each process of `pids` that still runs."""
    for pid in pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue


def has_variable(pid: int | str, variable: str) -> bool:
    """Return whether a process has `variable`, NAME=VALUE, in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return variable.encode() in file.read().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return False


def _parent_pid(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    main()
