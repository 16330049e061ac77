"""Processes of a node: an identity that no later process has, the kernel's state, and SIGKILL."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
#: fields of /proc/PID/stat after the name: state, user and system time, start time
_STATE, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS = 0, 11, 12, 19
_STOPPED, _UNINTERRUPTIBLE, _ENDED = "T", "D", "ZX"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process: its pid may later belong to another one, and in a container names another."""

    pid: int
    start_ticks: int  #: clock ticks since the boot of the host
    namespace: str  #: of process ids, such as "pid:[4026531836]"

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks} {self.namespace}"

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity:
        """Parse the text that `str(identity)` returns."""
        pid, start_ticks, namespace = text.split(" ", 2)
        return cls(int(pid), int(start_ticks), namespace)


@dataclass(frozen=True)
class ProcessState:
    """The kernel's view of a process."""

    letter: str  #: as in /proc/PID/stat: R, S, D, T, t, Z, ...
    cpu_ticks: int
    has_tracer: bool

    @property
    def has_ended(self) -> bool:
        return self.letter in _ENDED

    @property
    def is_blocked(self) -> bool:
        return self.letter == _UNINTERRUPTIBLE

    def shows_stop(self, previous: ProcessState | None) -> bool:
        """Return whether it was stopped, or blocked in the kernel, since the `previous` look.

        A process that a debugger holds is not: its user continues it.
        """
        if self.has_tracer:
            return False
        return self.letter == _STOPPED or (self.is_blocked and previous in (None, self))

    def __str__(self) -> str:
        cause = "blocked in the kernel" if self.is_blocked else "stopped by a signal"
        return f"state {self.letter}, {cause}"


def own_identity() -> ProcessIdentity:
    """Return the identity of this process; raise OSError on a system without /proc."""
    pid = os.getpid()
    return ProcessIdentity(
        pid, int(_read_stat(pid)[_START_TICKS]), os.readlink(PROC / "self" / "ns" / "pid")
    )


def read_state(process: ProcessIdentity) -> ProcessState | None:
    """Return the state of `process`; None if it has ended and left no zombie."""
    try:
        fields = _read_stat(process.pid)
        status = (PROC / str(process.pid) / "status").read_text(errors="replace")
    except OSError:
        return None
    if int(fields[_START_TICKS]) != process.start_ticks:
        return None
    cpu_ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessState(fields[_STATE], cpu_ticks, "\nTracerPid:\t0\n" not in status)


def kill(process: ProcessIdentity) -> bool:
    """Send SIGKILL to `process`; return whether it was still there."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # The descriptor holds the pid: what is verified now receives the signal.
        state = read_state(process)
        if state is None or state.has_ended:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def _read_stat(pid: int) -> list[str]:
    # The name, in parentheses, may contain spaces and parentheses.
    return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
