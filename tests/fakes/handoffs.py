"""What orders threads of the host, for the detector of races: each hand-over carries a clock.

Starts and ends of threads, events, queues, semaphores, futures and turns; and messages, barriers,
agreements and flags of ranks that are threads. A message of MPI carries none: other processes have
clocks of their own. Locks carry none: that one thread came first does not say that it must.
"""

from __future__ import annotations

import queue
import sys
import threading
from concurrent.futures import Future
from concurrent.futures.thread import _WorkItem
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np

from fakes.machine import CUDARuntimeError, machine

_SimpleQueue = queue.SimpleQueue


def _races():
    """Return the detector; None in a thread that is only just beginning."""
    return machine().races if threading.get_ident() in threading._active else None


def release(holder) -> None:
    """Let whoever acquires from `holder` know what this thread knows."""
    races = _races()
    if races is not None:
        with races.lock:
            epochs = races.host().epochs
            before = holder.__dict__.setdefault("race", {})
            for number, n in epochs.items():
                before[number] = max(n, before.get(number, 0))


def acquire(holder) -> None:
    """Know what was released into `holder`."""
    races, epochs = _races(), holder.__dict__.get("race")
    if races is not None and epochs:
        races.wait(epochs)


def _between(before=None, after=None, but_false=True):
    """Return a wrapper of methods: release their object before, acquire from it after.

    `but_false`: after a call that returns False, a limit of time or a look, nothing is acquired.
    """

    def wrap(method):
        def call(self, *args, **kwargs):
            if before:
                before(self)
            result = method(self, *args, **kwargs)
            if after and not (but_false and result is False):
                after(self)
            return result

        return call

    return wrap


class SimpleQueue(_SimpleQueue):
    """queue.SimpleQueue: each item brings the clock of whoever put it there."""

    def put(self, item, block=True, timeout=None):
        races = _races()
        super().put((item, None if races is None else dict(races.host().epochs)))

    def get(self, block=True, timeout=None):
        item, epochs = super().get(block, timeout)
        if epochs and _races() is not None:
            _races().wait(epochs)
        return item

    def put_nowait(self, item):
        self.put(item)

    def get_nowait(self):
        return self.get(block=False)


def _start(method):
    def start(self):
        if machine().races is not None:
            self.__dict__["race_parent"] = dict(machine().races.host().epochs)
        return method(self)

    return start


def _join(method):
    def join(self, timeout=None):
        method(self, timeout)
        races, clock = machine().races, self.__dict__.get("race_clock")
        if races is not None and clock is not None and not self.is_alive():
            races.wait(clock)

    return join


def _turn(method):
    @contextmanager
    def turn(self, entry):
        with method(self, entry):
            acquire(self)
            try:
                yield
            finally:
                release(self)

    return turn


def _posting(method, writes: bool, kind: str):
    """Wrap post_send or post_receive: an access that lasts until the request is done."""

    def post(self, message, peer):
        accesses = []
        for address, nbytes in _ranges(message):
            must_have_context(address)
            if machine().races is not None:
                access = machine().races.post(address, nbytes, writes, f"{kind} rank {peer}")
                accesses += [] if access is None else [access]
        request = method(self, message, peer)
        request.__dict__["accesses"] = accesses
        return request

    return post


def must_have_context(address: int) -> None:
    """Raise where MPI gets memory of a device from a thread that has no context of CUDA."""
    now = machine()
    if now.region(address) is not None and not getattr(now.here, "has_context", False):
        raise CUDARuntimeError(201, "cudaErrorDeviceUninitialized: this thread has no context")


def _ranges(message):
    for piece in [message] if isinstance(message, np.ndarray) else [spec[0] for spec in message]:
        if isinstance(piece, np.ndarray):
            yield piece.__array_interface__["data"][0], piece.nbytes
        else:
            yield piece.address, piece.nbytes


def _completing(method):
    """Wrap a test or wait of a request: what says that it is done, or failed, ends the access."""

    def call(self, *args):
        result = None
        try:
            result = method(self, *args)
        finally:
            if result is not False and machine().races is not None:
                for access in self.__dict__.pop("accesses", ()):
                    machine().races.complete(access)
                if holder := self.__dict__.pop("sent", None):
                    acquire(holder)
        return result

    return call


def _received(method):
    def receive_message(self, message):
        method(self, message)
        self.__dict__["sent"] = message

    return receive_message


def _made(method):
    def __init__(self, *args):
        method(self, *args)
        release(self)

    return __init__


class _Holder:
    """What the ranks know that take part in a round."""


_rounds: dict[tuple, _Holder] = {}


def _in_rounds(key_of):
    """Return a wrapper of collectives: each rank knows after it what all knew before it.

    `key_of(self)`: what all ranks of a round have in common, and no other round.
    """

    def wrap(method):
        def call(self, *args):
            holder = _rounds.setdefault(key_of(self), _Holder())
            release(holder)
            result = method(self, *args)
            acquire(holder)
            return result

        return call

    return wrap


def _barrier_of(waits) -> tuple:
    waits.__dict__["barriers"] = number = waits.__dict__.get("barriers", 0) + 1
    return id(waits.hub), "barrier", number


def _agreement_of(survivors) -> tuple:
    return id(survivors.hub), "agreement", survivors._agreements + 1


def _flags_of(flags) -> tuple:
    address = np.frombuffer(flags._words, np.uint8).ctypes.data
    return address, "flags", flags.next_head >> 32


def _patches():
    """Yield (class, method, wrapper)."""
    from hpctrain.engines.gossip.turns import TurnLock
    from hpctrain.transport.shared_memory.flags import NodeFlags
    from hpctrain.transport.threads import hub, requests
    from hpctrain.transport.threads.link import LocalLink
    from hpctrain.transport.threads.waits import LocalSurvivors, LocalWaits

    yield threading.Thread, "start", _start
    yield threading.Thread, "join", _join
    yield threading.Event, "set", _between(before=release)
    yield threading.Event, "wait", _between(after=acquire)
    yield threading.Event, "is_set", _between(after=acquire)
    yield threading.Semaphore, "release", _between(before=release)
    yield threading.Semaphore, "acquire", _between(after=acquire)
    yield _WorkItem, "__init__", _between(after=release)
    yield _WorkItem, "run", _between(before=acquire)
    yield Future, "set_result", _between(before=release)
    yield Future, "set_exception", _between(before=release)
    yield Future, "result", _between(after=acquire, but_false=False)
    yield Future, "exception", _between(after=acquire)
    yield Future, "done", _between(after=acquire)
    yield TurnLock, "turn", _turn
    yield NodeFlags, "agree", _in_rounds(_flags_of)
    yield LocalWaits, "barrier", _in_rounds(_barrier_of)
    yield LocalSurvivors, "_take_part", _in_rounds(_agreement_of)
    yield hub.SentMessage, "__init__", _made
    yield requests.Receive, "receive_message", _received
    links = [(LocalLink, (requests.Send, requests.Receive), ("is_finished", "done", "wait"))]
    if "hpctrain.transport.mpi.link" in sys.modules:
        from hpctrain.transport.mpi.link import MpiLink
        from hpctrain.transport.mpi.requests import MpiRequest

        links.append((MpiLink, (MpiRequest,), ("done", "wait")))
    for link, kinds, names in links:
        yield link, "post_send", lambda f: _posting(f, False, "send to")
        yield link, "post_receive", lambda f: _posting(f, True, "receive from")
        for kind in kinds:
            for name in names:
                yield kind, name, _completing


@contextmanager
def watched():
    """Let all hand-overs carry clocks within the block."""
    with ExitStack() as stack:
        for owner, name, wrapper in _patches():
            stack.enter_context(patch.object(owner, name, wrapper(getattr(owner, name))))
        modules = [m for name, m in list(sys.modules.items()) if name.startswith("hpctrain.")]
        for module in [queue, *modules]:
            if vars(module).get("SimpleQueue") is _SimpleQueue:
                stack.enter_context(patch.object(module, "SimpleQueue", SimpleQueue))
        yield
        _rounds.clear()
