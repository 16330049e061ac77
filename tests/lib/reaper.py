"""End all processes that a test run has started when pytest itself ends, SIGKILL included.

    pytest ==== pipe ====> reaper      python -I -S reaper.py FOLDER PID
      |                      :
    jobs, daemons         signals      all have HPCTRAIN_TEST_RUN=FOLDER in their environment

Nobody writes to the pipe. When pytest ends, the kernel closes the pipe, and the reaper reads
end-of-file. It kills the processes with the mark and their descendants, since some daemons of Slurm
overwrite their environment. Then it removes the shared memory of these processes, the files of
shared memory that ranks killed by tests have left, and FOLDER, the folder for temporary files of
the run. Once a second it looks which shared memory pytest has, which may be a rank of an MPI job
and be killed.

The reaper runs as a file and imports only the standard library: it starts in 20 ms. It is no child
of pytest and has a session of its own, so that neither a Ctrl-C nor a signal to the process group
of `make test` reaches it.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

MARK = "HPCTRAIN_TEST_RUN"
SET_PARENT_DEATH_SIGNAL = 1
POLL_INTERVAL_S, LOOK_INTERVAL_S = 0.05, 1.0
SEGMENTS = ("hpctrain", "mpich_shm_", "sm_segment.")  #: names of ours and of the MPI libraries
KILL_TIMEOUT_S = 30.0  #: only a process blocked in a file system outlives SIGKILL for longer


def start() -> str:
    """Start the reaper of this process, mark later child processes, and return the folder."""
    folder = tempfile.mkdtemp(prefix="hpctrain-", dir="/tmp")  # sockets need short paths
    os.chmod(folder, 0o711)  # munged refuses sockets that others cannot reach
    read_end, write_end = os.pipe()
    os.register_at_fork(after_in_child=os.fdopen(write_end, "wb", 0).close)  # pytest alone holds it
    environ = {name: value for name, value in os.environ.items() if name != MARK}
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, folder, str(os.getpid())], check=True, env=environ,
        stdin=read_end, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
        start_new_session=True,
    )  # fmt: skip
    os.close(read_end)
    os.environ[MARK] = folder
    return folder


def move_temporary_files(folder: str) -> None:
    """Let this process and its children create temporary files in `folder`.

    pytest keeps the folders of tests of its last three runs where they were.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def end_with_launcher() -> None:
    """Let the kernel kill this rank when its launcher dies: Open MPI looks only in MPI calls."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Wait until pytest ends, then end its processes and remove their files."""
    if os.fork():
        return
    with open("/proc/self/comm", "w") as file:
        file.write("test-reaper")  # what `top` shows
    run, pytest = sys.argv[1], int(sys.argv[2])
    begin_s = time.time()
    segments: set[tuple[str, int]] = set()
    while not select.select([0], [], [], LOOK_INTERVAL_S)[0]:
        segments |= shared_memory(pytest)
    end(lambda: find_processes(run))
    remove(segments | find_abandoned(begin_s))
    unmount_below(run)
    shutil.rmtree(run, ignore_errors=True)


def end(find: Callable[[], set[int]]) -> None:
    """Kill the processes whose ids `find` returns, and remove their shared memory."""
    pids = stop(find)
    segments = set().union(*map(shared_memory, pids))
    kill(pids)
    remove(segments)


def remove(segments: Iterable[tuple[str, int]]) -> None:
    """Remove files of shared memory, but no other files of the same names."""
    for path, inode in segments:
        with suppress(OSError):  # the MPI library has removed it
            if os.stat(path).st_ino == inode:
                os.unlink(path)


def stop(find: Callable[[], set[int]]) -> set[int]:
    """Stop processes until `find` returns no other, and return the ids of all.

    A process that is stopped creates no other, and remains the parent of those without the mark.
    """
    stopped: set[int] = set()
    while pids := find() - stopped:
        send_signal(pids, signal.SIGSTOP)
        stopped |= pids
    return stopped


def kill(pids: Iterable[int]) -> None:
    """Kill processes and wait for their ends."""
    send_signal(pids, signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def find_processes(run: str) -> set[int]:
    """Return the ids of the processes with the mark of a run, and of their descendants."""
    return with_descendants({pid for pid in all_pids() if has_mark(pid, run)})


def with_descendants(pids: set[int]) -> set[int]:
    """Return the ids of processes and of all their descendants."""
    parents = {pid: int(status(pid)[1]) for pid in all_pids()}
    while children := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids = pids | children
    return pids


def all_pids() -> list[int]:
    """Return the ids of all processes of this host."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def has_mark(pid: int, run: str) -> bool:
    """Return whether a process was started with the mark of a run."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False
    return f"{MARK}={run}".encode() in variables


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return status(pid)[0] not in "ZX"


def status(pid: int) -> list[str]:
    """Return the state and the parent of a process; X and 0 if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["X", "0"]


def shared_memory(pid: int) -> set[tuple[str, int]]:
    """Return the path and the inode of each file in /dev/shm that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    rows = [line.split(maxsplit=5) for line in lines if " /dev/shm/" in line]
    return {(row[5], int(row[4])) for row in rows}


def find_abandoned(begin_s: float) -> set[tuple[str, int]]:
    """Return the files of shared memory made after a time that no process has open or maps."""
    files = set()
    for name in filter(lambda name: name.startswith(SEGMENTS), os.listdir("/dev/shm")):
        with suppress(OSError):  # its job has removed it
            file = os.stat(f"/dev/shm/{name}")
            if file.st_uid == os.getuid() and file.st_ctime > begin_s:
                files.add((f"/dev/shm/{name}", file.st_ino))
    for pid in all_pids():  # descriptors first: a job closes them when it has mapped the file
        held = open_files(pid) | {path for path, _ in shared_memory(pid)}
        files = {file for file in files if file[0] not in held}
    return files


def open_files(pid: int) -> set[str]:
    """Return the paths of a process's descriptors."""
    paths = set()
    with suppress(OSError):  # it has ended, or belongs to another user
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                paths.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return paths


def unmount_below(folder: str) -> None:
    """Unmount all file systems below a folder, the innermost first."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in reversed(places):
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", place])


if __name__ == "__main__":
    main()
