"""Signals reach a rank inside a blocking C call; earlier handlers are restored."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from queue import Queue

import pytest

from hpctrain.core.signals import SIGNALS, StopRequest

# The main thread takes a mutex twice: like blocking MPI it does not return to Python, and a signal
# does not end it. The helper tells what it sees meanwhile, then lets the main thread go.
CHILD = r"""
import ctypes, signal, sys, threading, time
from hpctrain.core.signals import StopRequest

libc, mutex, plain = ctypes.CDLL(None), ctypes.create_string_buffer(256), []
look_s, hold_s = map(float, sys.argv[1:])

def helper(request):
    while int.from_bytes(mutex[:4], sys.byteorder) != 2:  # in glibc: locked, and awaited
        time.sleep(0.01)
    print("ready", flush=True)
    end = time.monotonic() + look_s
    while not (request.requested or plain) and time.monotonic() < end:
        time.sleep(0.01)
    print("saw", request.requested, request.signal or "-", len(plain), flush=True)
    time.sleep(hold_s)
    libc.pthread_mutex_unlock(mutex)

signal.signal(signal.SIGUSR2, lambda *_: plain.append(1))
with StopRequest(lambda: "results: here\n") as request:
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=helper, args=(request,), daemon=True).start()
    libc.pthread_mutex_lock(mutex)
print("returned", request.requested, flush=True)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("number", "look_s", "observed"),
    [
        (signal.SIGUSR1, 15, "True SIGUSR1"),
        (signal.SIGTERM, 15, "True SIGTERM"),
        (signal.SIGINT, 15, "True SIGINT"),
        # The control: a plain Python handler has to wait for the call, so the call does block.
        (signal.SIGUSR2, 1, "False -"),
    ],
)
def test_signal_while_the_main_thread_is_in_c(
    start: Callable, number: signal.Signals, look_s: float, observed: str
) -> None:
    job = start("-c", CHILD, look_s, 0)
    job.until("ready")
    job.process.send_signal(number)
    ended = job.finish(20)
    requested = observed.split()[0]
    assert ended.stdout == f"ready\nsaw {observed} 0\nreturned {requested}\n"
    assert (ended.stderr, ended.returncode) == ("", 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("first", "second", "code", "message"),
    [
        (signal.SIGINT, signal.SIGINT, 130, "interrupted\nresults: here\n"),
        (signal.SIGTERM, signal.SIGINT, 0, ""),
        (signal.SIGUSR1, signal.SIGUSR1, 0, ""),
    ],
)
def test_only_a_second_interrupt_ends_the_process(
    start: Callable, first: signal.Signals, second: signal.Signals, code: int, message: str
) -> None:
    job = start("-c", CHILD, 15, 1)
    job.until("ready")
    job.process.send_signal(first)
    job.until(f"saw True {first.name}")
    job.process.send_signal(second)
    ended = job.finish(20)
    assert (ended.returncode, ended.stderr) == (code, message)
    assert ("returned True" in ended.stdout) == (code == 0)


def test_a_read_in_a_c_library_survives_the_signal() -> None:
    reading, writing = os.pipe()
    main = threading.get_ident()

    def interrupt_then_send() -> None:
        time.sleep(0.2)
        signal.pthread_kill(main, signal.SIGUSR1)
        time.sleep(0.2)
        os.write(writing, b"x")

    thread = threading.Thread(target=interrupt_then_send, daemon=True)
    with StopRequest() as request:
        thread.start()
        count = ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
    thread.join(10)
    os.close(reading)
    os.close(writing)
    assert (count, request.requested) == (1, True)


def state() -> list[object]:
    """Return all that StopRequest changes in this process."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    names = {thread.name for thread in threading.enumerate()}
    return [wakeup, "hpctrain-stop" in names, *map(signal.getsignal, SIGNALS)]


def test_exit_puts_back_what_was_there() -> None:
    before = state()
    for number in SIGNALS:
        with StopRequest() as request:
            assert all(now != then for now, then in zip(state(), before, strict=True))
            signal.raise_signal(number)
        # The thread reads the socket to its end before it is joined.
        assert (request.requested, request.signal) == (True, number.name)
        assert state() == before


def test_elsewhere_than_in_the_main_thread_it_waits_to_be_asked() -> None:
    before, observed = state(), Queue[list[object]]()

    def rank() -> None:
        with StopRequest() as request:
            observed.put([request.requested, request.signal, *map(signal.getsignal, SIGNALS)])
            request.ask("vote")
            request.ask("later")
            observed.put([request.requested, request.signal])

    thread = threading.Thread(target=rank, daemon=True)
    thread.start()
    assert observed.get(timeout=10) == [False, "", *before[2:]]
    assert observed.get(timeout=10) == [True, "vote"]
    thread.join(10)
    assert state() == before
