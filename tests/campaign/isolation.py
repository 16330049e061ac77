"""Linux namespaces for a case: its own processes, mounts and shared memory.

Whatever is in them after the job has ended was left by the job; and it ends with the namespace.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS = 0x00020000, 0x08000000, 0x10000000, 0x20000000
SHARED_MEMORY = "/dev/shm"


def unavailable() -> str:
    """Return why there can be no namespaces here; empty if there can."""
    child = os.fork()
    if child == 0:
        os._exit(_tried())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "" if code == 0 else f"no namespaces here: {os.strerror(code)}"


def _tried() -> int:
    try:
        _unshare()
    except OSError as error:
        return error.errno or 1
    return 0


def isolated(act: Callable[[], None]) -> int:
    """Fork a child that calls `act` as process 1 of new namespaces; return the child's id.

    It exits with 0 if `act` returned.
    """
    outer = os.fork()
    if outer == 0:
        os._exit(_enter(act))
    return outer


def _enter(act: Callable[[], None]) -> int:
    _unshare()
    inner = os.fork()
    if inner == 0:
        try:
            _mount()
            act()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF


def _unshare() -> None:
    flags, user, group = NEW_MOUNTS | NEW_IPC | NEW_PIDS, os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags if user == 0 else flags | NEW_USER):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _mount() -> None:
    for words in (
        ["--make-rprivate", "/"],
        ["-t", "proc", "proc", "/proc"],
        ["-t", "tmpfs", "-o", "mode=1777", "campaign", SHARED_MEMORY],
    ):
        subprocess.run(["mount", *words], check=True)


def processes() -> dict[int, str]:
    """Return the command lines of all other processes of the namespace that are no zombies."""
    alive = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(") ")[2][0]
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if folder.name != "1" and state not in "ZX":
            alive[int(folder.name)] = line.strip()
    return alive


def ended(limit_s: float) -> tuple[dict[int, str], float]:
    """Wait until no process is left, `limit_s` at most; return those left and the seconds."""
    began = time.monotonic()
    while (remaining := processes()) and time.monotonic() - began < limit_s:
        time.sleep(0.02)
    return remaining, time.monotonic() - began


def shared_memory() -> list[str]:
    """Return what lies in /dev/shm, and the segments of System V."""
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return sorted(os.listdir(SHARED_MEMORY)) + [f"sysv {line.split()[1]}" for line in segments]


def kill_all() -> None:
    """Kill all other processes of the namespace."""
    while remaining := processes():
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def clear(*folders: Path) -> None:
    """Empty the shared memory of the namespace and `folders`, when no process is left."""
    for path in (path for folder in (Path(SHARED_MEMORY), *folders) for path in folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
