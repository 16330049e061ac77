"""Linux namespaces for a case: its own processes, mounts and shared memory.

Whatever is in them after the job has ended was left by the job; and it ends with the namespace.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS = 0x00020000, 0x08000000, 0x10000000, 0x20000000
PR_SET_PDEATHSIG = 1
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

    It exits with 0 if `act` returned. Like a child of `forked`, it ends when this process does.
    """
    return _fork(partial(_enter, act), signal.SIGKILL)


def forked(act: Callable[[], None]) -> int:
    """Fork a child that calls `act` in the namespaces of this process; return the child's id."""
    return _fork(act, signal.SIGTERM)


def _enter(act: Callable[[], None]) -> None:
    _unshare()
    inner = _fork(partial(_mount_and_act, act), signal.SIGKILL)
    if os.waitpid(inner, 0)[1]:
        raise SystemExit(1)


def _mount_and_act(act: Callable[[], None]) -> None:
    _mount()
    act()


def _fork(act: Callable[[], None], at_death_of_parent: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, at_death_of_parent)
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


def _mount() -> None:
    for words in (
        ["--make-rprivate", "/"],
        ["-t", "proc", "proc", "/proc"],
        ["-t", "tmpfs", "-o", "mode=1777", "campaign", SHARED_MEMORY],
    ):
        subprocess.run(["mount", *words], check=True)
