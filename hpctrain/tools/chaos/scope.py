"""The processes and shared memory of a case, so that whatever is left there is the case's.

    Scope        the case is alone in Linux namespaces, its own processes, mounts and shared
                 memory: whatever is there after the job was left by it, and ends with them
    Marked       elsewhere, as on a cluster: an environment variable marks the processes, as
                 cluster/guard.py does; shared memory is the case's if it is new, ours and unused

Both have `unchecked`: sentences on what cannot be checked there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from hpctrain.cluster.guard import has_variable
from hpctrain.core.rank_marks import end_with_parent
from hpctrain.transport.shared_memory.dev_shm import used_files

MARK = "HPCTRAIN_CHAOS"  #: the variable that marks all processes of a case
SHARED_MEMORY = Path("/dev/shm")
NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS = 0x00020000, 0x08000000, 0x10000000, 0x20000000


class Scope:
    """The surroundings of a case: it is alone in namespaces."""

    unchecked: Sequence[str] = ()
    has_own_mounts = True  #: whether the case may mount disks of its own

    def variables(self) -> dict[str, str]:
        """Return variables that the job needs."""
        return {}

    def processes(self) -> dict[int, str]:
        """Return the command lines of other processes, zombies excluded."""
        own = {1, os.getpid()}
        return {pid: line for pid in _pids() if pid not in own and (line := command_line(pid))}

    def shared_memory(self) -> list[str]:
        """Return the files in /dev/shm, and the segments of System V."""
        segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        return sorted(os.listdir(SHARED_MEMORY)) + [f"sysv {line.split()[1]}" for line in segments]


class Marked(Scope):
    """A case whose processes carry a mark in their environment."""

    has_own_mounts = False

    def __init__(self, mark: str, on_other_hosts: bool = False):
        self._mark, self._before = mark, {*_shared_files()}
        self.unchecked = [
            "no namespaces: processes that cleared their environment, segments of System V",
            *["processes and shared memory on other hosts"] * on_other_hosts,
        ]

    def variables(self) -> dict[str, str]:
        """Return the mark."""
        return {MARK: self._mark}

    def processes(self) -> dict[int, str]:
        """Return the command lines of this host's processes that carry the mark."""
        mark = f"{MARK}={self._mark}"
        return {
            pid: line for pid in _pids() if has_variable(pid, mark) and (line := command_line(pid))
        }

    def shared_memory(self) -> list[str]:
        """Return our files in /dev/shm that are new, and that no process has mapped or open."""
        if not (spare := {*_shared_files()} - self._before):
            return []
        used = {Path(x).relative_to(SHARED_MEMORY).parts[0] for x in used_files(SHARED_MEMORY)}
        return sorted(spare - used)


def wait_for_processes(scope: Scope, limit_s: float) -> tuple[dict[int, str], float]:
    """Wait up to `limit_s` for all processes to end; return remaining processes and seconds."""
    start_s = time.monotonic()
    while (remaining_processes := scope.processes()) and time.monotonic() - start_s < limit_s:
        time.sleep(0.02)
    return remaining_processes, time.monotonic() - start_s


def kill_all(scope: Scope) -> None:
    """Kill all processes of the case."""
    while remaining_processes := scope.processes():
        for pid in remaining_processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def clear(scope: Scope, *folders: Path) -> None:
    """Remove the shared memory that the case has left, and the contents of `folders`."""
    left_files = [
        SHARED_MEMORY / name for name in scope.shared_memory() if not name.startswith("sysv ")
    ]
    for path in (*left_files, *(path for folder in folders for path in folder.iterdir())):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _pids() -> Iterable[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def command_line(pid: int) -> str:
    """Return the command line of a process, or its name; '' if it has ended, or is a zombie."""
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return ""
    if fields[0] in "ZX":
        return ""
    return line.decode(errors="replace").strip() or name.partition("(")[2]


def _shared_files() -> list[str]:
    """Return the names of this user's files in /dev/shm."""
    file_names = []
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        with suppress(OSError):
            file_names += [path.name] * (path.lstat().st_uid == os.getuid())
    return file_names


def unavailable() -> str:
    """Return why there can be no namespaces here; empty if there can."""
    child = os.fork()
    if child == 0:
        try:
            _unshare()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "" if code == 0 else f"no namespaces here: {os.strerror(code)}"


def isolated(act: Callable[[], None]) -> int:
    """Fork a child that calls `act` as process 1 of new namespaces; return the child's id.

    It exits with 0 if `act` returned. Like a child of `forked`, it ends when this process does.
    """
    return forked(partial(_enter, act), signal.SIGKILL)


def _enter(act: Callable[[], None]) -> None:
    _unshare()
    inner = forked(partial(_mount_and_act, act), signal.SIGKILL)
    if os.waitpid(inner, 0)[1]:
        raise SystemExit(1)


def forked(act: Callable[[], None], at_death_of_parent: int = signal.SIGTERM) -> int:
    """Fork a child that calls `act` in the namespaces of this process; return the child's id."""
    child = os.fork()
    if child == 0:
        try:
            end_with_parent(at_death_of_parent)
            # Ctrl-C is for the command. No SIG_IGN: the job would inherit it.
            signal.signal(signal.SIGINT, lambda *_: None)
            signal.signal(signal.SIGTERM, _exit)
            act()
            os._exit(0)
        except SystemExit:
            os._exit(1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def _exit(*_: object) -> NoReturn:
    raise SystemExit(1)


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


def _mount_and_act(act: Callable[[], None]) -> None:
    for words in (
        ["--make-rprivate", "/"],
        ["-t", "proc", "proc", "/proc"],
        ["-t", "tmpfs", "-o", "mode=1777", "campaign", str(SHARED_MEMORY)],
    ):
        subprocess.run(["mount", *words], check=True)
    act()
