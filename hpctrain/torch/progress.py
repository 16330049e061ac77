"""Progress of a group's operations: in the caller's thread, or in a thread of the group.

    rank 0    all_reduce (asynchronous) | send        | wait      its thread waits for rank 1,
    rank 1    receive                   | all_reduce              and then reduces

MPI matches collectives by their order, so a group runs one at a time, in the order of its calls. An
operation that all ranks have begun needs no further call by a script: threads, or waits, run it.
So its caller runs it at once. Until then only a thread may wait: the caller of an asynchronous
operation has other things to do, which its peers may need first.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.errors import LostRankError, TransportError
from hpctrain.torch.begun import Begun
from hpctrain.torch.work import RunningWork
from hpctrain.transport.device import gpus
from hpctrain.transport.mpi.calls import MpiCalls, calls_of
from hpctrain.transport.pace import SPIN_S, Pace
from hpctrain.watch import Entry, WatchRecord
from hpctrain.watch.trace import Trace
from hpctrain.world import World

ALL_RANKS = -1
#: An asynchronous call waits so long for late ranks before it leaves its operation to the thread:
#: ranks in step then reduce in their callers' threads, which is faster where they fill the cores.
PATIENCE_S = 5e-3
#: Threads of more groups share the last entry of the watch's record.
_MAX_THREAD_ENTRIES = 4
_ABORTED = "the process group was aborted: make another by new_group"


_thread_numbers = count(1)


def make_quiet_runner() -> Callable[[Callable[[], Any]], Any]:
    """Return a function that runs a call without NumPy's warnings, as PyTorch has none of overflow.

    One call at a time. NumPy 2 keeps its settings in a context, whose use takes a twentieth of
    `np.errstate`; NumPy 1 keeps them by thread.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return np.errstate(all="ignore")(_call)
    context = Context()
    context.run(np.seterr, all="ignore")
    return context.run


def _call(call: Callable[[], Any]) -> Any:
    return call()


class Operation(NamedTuple):
    """A collective, with its name and length for the watch."""

    name: bytes
    nbytes: int
    call: Callable[[], Any]


@dataclass(eq=False)
class _Pending:
    """An operation that has not run yet."""

    operation: Operation
    work: RunningWork
    number: int
    is_taken: bool = False  # it runs, or is over


class Progress:
    """A rank's operations in one group, in order; any thread may call."""

    def __init__(
        self,
        world: World,
        record: WatchRecord,
        limit_s: float,
        on_loss: Callable[[], Any],
        *,
        begun: Begun | None,
        has_thread: bool,
        trace: Trace,
    ):
        """`begun`: without it the thread begins operations at once, whatever other ranks do.

        `has_thread`: whether there may be one; else all operations run in their calls.
        """
        self._link, self._waits = world.main.link, [*map(calls_of, world.main.links)]
        self._record, self._on_loss, self._gpu = record, on_loss, world.gpu
        self.limit_s = limit_s
        self._begun, self._has_thread = begun, has_thread
        self._entry = record.entry("torch")
        self._lock = threading.RLock()  # held while an operation runs
        self._number = 0  # of the last operation that was begun
        self._waiting: deque[_Pending] = deque()
        self._count_lock = threading.Lock()  # so that both have one order
        self._inbox: SimpleQueue[_Pending | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_aborted = False
        self._quiet, self._trace = make_quiet_runner(), trace
        self._runner = 0  # the thread that runs waiting operations now

    def run(self, name: bytes, nbytes: int, call: Callable[[], Any]) -> None:
        """Run an operation to its end, after those that are under way."""
        number = self._begin()
        if (self._waiting or self._runner) and self._has_earlier():
            operation = Operation(name, nbytes, call)
            self._leave_to_thread(operation, RunningWork([], self.finish), number).wait()
        else:
            self._run(name, nbytes, call)

    def start(self, operation: Operation, tensors: Any) -> RunningWork:
        """Start an operation, whose results are `tensors`; no rank's caller waits for it.

        One that the callback of a future starts runs at once.
        """
        work, number = RunningWork(tensors, self.finish), self._begin()
        if (
            not self._has_thread
            or self._runner == threading.get_ident()
            or (not self._has_earlier() and self._is_begun_soon(number))
        ):
            self._run_work(operation, work)
            return work
        return self._leave_to_thread(operation, work, number)

    def finish(self, work: RunningWork) -> None:
        """Run the waiting operations up to `work` here, unless the thread runs them now."""
        with self._lock:
            runner, self._runner = self._runner, threading.get_ident()
            try:
                while not work.is_completed() and (pending := self._take_first()):
                    self._run_work(pending.operation, pending.work)
            finally:
                self._runner = runner

    def close(self) -> None:
        """Finish what is under way; raise TransportError if it is not over within the limit."""
        if self._thread is None:
            return
        atexit.unregister(self.close)
        self._inbox.put(None)
        self._thread.join(self.limit_s)
        if self._thread.is_alive():
            raise TransportError(
                f"destroy_process_group: {len(self._waiting)} operations were not over within "
                f"{self.limit_s:g} s: have all ranks called them?"
            )
        self._thread = None

    def abort(self) -> None:
        """Let operations that do not run yet fail, and all later calls; waits for no rank."""
        self._is_aborted = True
        while (pending := self._take_first()) is not None:
            pending.work.fail(TransportError(_ABORTED))

    def _has_earlier(self) -> bool:
        """Return whether other operations come first; the calling callback's own do not count."""
        return bool(self._waiting or self._runner) and self._runner != threading.get_ident()

    def _begin(self) -> int:
        if self._is_aborted:
            raise TransportError(_ABORTED)
        with self._count_lock:
            self._number += 1
            if self._begun is not None:
                self._begun.begin(self._number)
            return self._number

    def _is_begun_soon(self, number: int) -> bool:
        """Return whether all ranks have begun operation `number`, or do so within a moment."""
        if self._begun is None:
            return False
        if self._begun.by_all(number):
            return True
        try:
            Pace(SPIN_S, PATIENCE_S).until(partial(self._begun.by_all, number))
        except TimeoutError:
            return False
        return True

    def _leave_to_thread(self, operation: Operation, work: RunningWork, number: int) -> RunningWork:
        with self._count_lock:
            pending = _Pending(operation, work, number)
            self._waiting.append(pending)
            self._inbox.put(pending)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_thread, name="hpctrain-torch", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)  # before MPI ends
        return work

    def _run_thread(self) -> None:
        if self._gpu is not None:  # MPI needs CUDA's context in each thread that calls it
            gpus.use_gpu(self._gpu.ordinal)
        number = min(next(_thread_numbers), _MAX_THREAD_ENTRIES)
        entry = self._record.entry(f"torch thread {number}")
        watcher = calls_of(self._link.endpoint.view())
        watcher.entry = entry
        while (pending := self._inbox.get()) is not None:
            watcher.nap_after(0.0, self.limit_s)
            try:
                self._wait_for_peers(pending, watcher)
            except LostRankError:
                self._on_loss()
            except TransportError as error:
                self._give_up(pending, error)
                continue
            with self._lock, self._recorded_in(entry):
                self.finish(pending.work)

    def _wait_for_peers(self, pending: _Pending, watcher: MpiCalls) -> None:
        """Return once all ranks have begun the operation, or this rank's wait runs it."""
        begun = self._begun
        if begun is not None:
            name, nbytes, _ = pending.operation
            watcher.wait_for(
                lambda: pending.is_taken or begun.by_all(pending.number), name, ALL_RANKS, nbytes
            )

    def _give_up(self, pending: _Pending, error: TransportError) -> None:
        with self._count_lock:
            if pending.is_taken:
                return
            self._waiting.remove(pending)
            pending.is_taken = True
        pending.work.fail(error)

    def _take_first(self) -> _Pending | None:
        with self._count_lock:
            if not self._waiting:
                return None
            pending = self._waiting.popleft()
            pending.is_taken = True
            return pending

    def _run_work(self, operation: Operation, work: RunningWork) -> None:
        try:
            self._run(*operation)
        except BaseException as error:
            work.fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            work.finish()

    def _run(self, name: bytes, nbytes: int, call: Callable[[], Any]) -> None:
        """Call while no other collective of the group runs, with a note in the watch's record."""
        with self._lock:
            self._entry.enter(name, ALL_RANKS, nbytes)
            start_s = perf_counter()
            try:
                self._quiet(call)
            except LostRankError:
                self._on_loss()
            finally:
                self._entry.leave()
                if self._trace.is_recording:
                    args = {"bytes": nbytes}
                    self._trace.add(name.decode(), "wire", start_s, perf_counter(), args)

    @contextmanager
    def _recorded_in(self, entry: Entry) -> Iterator[None]:
        """Let the group's calls be recorded in the thread's `entry`, while it holds the lock."""
        own, entries = self._entry, [waits.entry for waits in self._waits]
        self._entry = entry
        for waits in self._waits:
            waits.entry = entry
        try:
            yield
        finally:
            self._entry = own
            for waits, earlier in zip(self._waits, entries, strict=True):
                waits.entry = earlier
