"""The time limit of MPI_Init, which no Python thread can keep: mpi4py holds the interpreter's lock.

POSIX timers call functions of the C library in threads of their own: `warnx` prints a message, and
`_exit` ends the process with 86, the code of a hang.
"""

from __future__ import annotations

import ctypes
import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.core.errors import HungError

_SIGEV_THREAD = 2
_STACKS_S, _EXIT_S = 0.2, 0.4  #: after the message
_LIBC = ctypes.CDLL(None)


class _Event(ctypes.Structure):
    """C's `struct sigevent`: `function` is called with `value`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """C's `struct itimerspec`, without a period."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("period_s", "period_ns", "s", "ns"))


@contextmanager
def init_limit(limit_s: float, text: str) -> Iterator[None]:
    """End this process with 86 after `limit_s` within the context, with `text` and its stacks."""
    message = ctypes.create_string_buffer(text.replace("%", "%%").encode())
    program = ctypes.c_char_p.in_dll(_LIBC, "program_invocation_short_name")  # warnx prints it
    timers = [
        _start(limit_s, _LIBC.warnx, ctypes.addressof(message)),
        _start(limit_s + _EXIT_S, _LIBC._exit, HungError.exit_code),
    ]
    faulthandler.dump_traceback_later(limit_s + _STACKS_S, exit=False)
    previous, program.value = program.value, b"hpctrain"
    try:
        yield
    finally:
        program.value = previous
        faulthandler.cancel_dump_traceback_later()
        for timer in timers:
            _LIBC.timer_delete(timer)


def _start(delay_s: float, function: object, value: int) -> ctypes.c_void_p:
    address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]
    event, timer = _Event(value, 0, _SIGEV_THREAD, address), ctypes.c_void_p()
    _LIBC.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer))
    times = _Times(0, 0, int(delay_s), int(delay_s % 1 * 1e9))
    _LIBC.timer_settime(timer, 0, ctypes.byref(times), None)
    return timer
