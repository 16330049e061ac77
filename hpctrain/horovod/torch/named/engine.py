"""Operations of a process set: submitted by name in any order, run in one order on all ranks.

    rank 0 (coordinator)                     rank 1
    submit b                                 submit a, b
      |  <--------- a, b ------------------    |
    submit a
      |  ---------- run b, a ------------->    |
    b and a in one all-reduce                b and a in one all-reduce

A rank sends what it submits to the coordinator, which tells all ranks what all have submitted. No
rank waits for another before then. Messages are looked for by whoever waits for an operation, or by
a thread while operations are under way; with none under way, nobody looks.

Tensors of a decision are fused: copied into one buffer and reduced together.
Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning", 2018.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hpctrain.core.errors import LostRankError
from hpctrain.core.printing import say
from hpctrain.horovod.torch.named.entries import Entry, HorovodInternalError
from hpctrain.horovod.torch.named.execution import Execution
from hpctrain.horovod.torch.named.messages import Messages
from hpctrain.horovod.torch.named.requests import JOIN, LEAVE, UNNAMED, Request, is_unnamed
from hpctrain.horovod.torch.named.settings import Settings
from hpctrain.torch.communicator import make_world, nap_while_waiting
from hpctrain.torch.progress import make_quiet_runner
from hpctrain.transport.device import gpus
from hpctrain.transport.pace import SPIN_S, Pace
from hpctrain.watch.inside import ALL_RANKS
from hpctrain.world import World

GRACE_S = 5.0
_SHUT_DOWN = "Horovod has been shut down"


class Engine:
    """A rank's operations in one process set; any thread may call."""

    def __init__(
        self,
        job: World,
        ranks: Sequence[int],
        tag: int,
        settings: Settings,
        on_loss: Callable[[], Any],
    ):
        """Make the links of `ranks` of `job`, by tags `tag` and the next; collective over these.

        `on_loss` is called when a rank was lost, before all operations fail.
        """
        self._on_loss = on_loss
        self.ranks, self._settings = tuple(ranks), settings
        self.world = make_world(job, self.ranks, tag, settings.threaded)
        nap_while_waiting(self.world.main, settings.limit_s, settings.threaded)
        self._messages = Messages(job.link.create_group(self.ranks, tag + 1), self.ranks)
        self._trace = job.trace
        self._execution = Execution(self.world, self.ranks, settings, self._trace)
        assert job.threads.record is not None  # ranks are processes
        self._record = job.threads.record.entry("horovod")
        self._gpu, self._has_thread = job.gpu, job.concurrent and len(self.ranks) > 1
        self._quiet = make_quiet_runner()
        self._entries: dict[str, Entry] = {}
        self._unsent: deque[Entry] = deque()
        self._lock = threading.Lock()  # held while messages are looked for, and operations run
        self._callers = 0  # that look for messages themselves
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed, self._next_check_s = False, 0.0
        self._numbers: Counter[str] = Counter()  # of operations without a name, by kind
        self.failure: str = ""  #: why no operation can succeed any more
        self.has_lost = False  #: whether a lost rank is the reason
        self.is_intact = True  #: whether a closed engine left no operation half done

    def next_number(self, kind: str) -> int:
        """Return the number of the next operation without a name."""
        self._numbers[kind] += 1
        return self._numbers[kind]

    def _count_unnamed(self, request: Request) -> None:
        """Count an operation without a name that other ranks made after this one had joined."""
        if is_unnamed(request.name):
            kind, _, number = request.name.rpartition(UNNAMED)
            self._numbers[kind] = max(self._numbers[kind], int(number))

    def submit(self, entry: Entry, is_async: bool) -> None:
        """Begin an operation; if it is asynchronous, a thread will run it.

        Raises ValueError if an operation of this name is under way.
        """
        if self.failure:
            raise HorovodInternalError(self.failure)
        name = entry.request.name
        if self._entries.setdefault(name, entry) is not entry:
            raise ValueError(
                f"{entry.request.kind} '{name}': an operation of this name is under way; "
                "synchronize it first, or give each operation its own name"
            )
        self._unsent.append(entry)
        if is_async and self._has_thread and not self._wake.is_set():
            if self._thread is None:
                run, name = self._run_thread, "hpctrain-horovod"
                self._thread = threading.Thread(target=run, name=name, daemon=True)
                self._thread.start()
            self._wake.set()

    def finish(self, entry: Entry, limit_s: float = 0.0) -> None:
        """Return once `entry` is over; raise HorovodInternalError if it failed.

        `limit_s` of the wait: by default a little more than the coordinator's, whose error says
        more.
        """
        is_recorded = not limit_s
        limit_s = limit_s or self._settings.limit_s + GRACE_S
        self._callers += 1
        if is_recorded:
            self._record.enter(entry.request.name.encode()[:24], ALL_RANKS, 0)
        try:
            with self._trace.span("wait for operations", "wait"):
                Pace(SPIN_S, limit_s).until(partial(self._poll, entry), self._check)
        except TimeoutError:
            self._break(f"'{entry.request.name}', {entry.request}: not over within {limit_s:g} s")
        finally:
            self._callers -= 1
            if is_recorded:
                self._record.leave()
        if entry.error:
            raise HorovodInternalError(entry.error) from entry.cause

    def run(self, request: Request, limit_s: float = 0.0) -> Any:
        """Return the result of an operation without tensors, once it is over; see `finish`."""
        entry = Entry(request)
        self.submit(entry, is_async=False)
        self.finish(entry, limit_s)
        return entry.result

    def is_over(self, entry: Entry) -> bool:
        """Return whether `entry` is over; without a thread, look for messages."""
        if not self._has_thread and not self._poll(entry):
            self._check()
        return entry.is_over

    def close(self, *, tells: bool = False) -> None:
        """End the thread; operations under way that other ranks do not soon submit fail.

        With `tells` the other ranks learn of it, whose operations fail from then on, too. This rank
        waits until its own are over, for no answer.
        """
        tells = tells and not self.failure
        if tells:
            with suppress(HorovodInternalError):  # of another rank that leaves at this moment
                self.submit(Entry(LEAVE), is_async=False)

        def is_idle() -> bool:
            return {*self._entries} <= {LEAVE.name}

        def is_over() -> bool:
            return self._advance() or (is_idle() and not self._unsent and not self._is_sending())

        try:
            Pace(SPIN_S, GRACE_S).until(is_over)
        except TimeoutError:
            if tells:  # it leaves without what it has submitted
                self._unsent.append(Entry(LEAVE))
                self._try_progress(GRACE_S)
        self.is_intact = is_idle() and (self.failure or _SHUT_DOWN).startswith(_SHUT_DOWN)
        self._is_closed = True
        self._break(_SHUT_DOWN)
        self._wake.set()
        if self._thread is not None:
            self._thread.join(GRACE_S)

    def free(self) -> None:
        """Give back the links of a closed engine; all its ranks must call."""
        assert self.world.parent is not None
        self.world.parent.threads.sub_worlds.remove(self.world.threads)
        self.world.main.free()
        self._messages.free(self._settings.limit_s)

    def _poll(self, entry: Entry) -> bool:
        if not self._is_finished(entry):
            self._try_progress()
        return self._is_finished(entry)

    def _try_progress(self, limit_s: float = 0.0) -> None:
        """Make progress unless another thread does, and goes on to for `limit_s`."""
        if self._lock.acquire(timeout=limit_s):
            try:
                self._progress()
            finally:
                self._lock.release()

    def _advance(self) -> bool:
        """Make progress unless callers do; return whether nothing is under way."""
        if not self._callers:
            self._try_progress()
        return not self._entries and not self._is_sending()

    def _is_finished(self, entry: Entry) -> bool:
        """Return whether `entry` is over, and others have the decisions that this rank sent."""
        return entry.is_over and not self._is_sending()

    def _is_sending(self) -> bool:
        """Return whether messages are on their way; after a loss none arrives."""
        return self._messages.mailbox.has_unsent and not self.failure

    def _progress(self) -> None:
        """Send what was submitted, look for messages, and run what all ranks have submitted."""
        if self.failure:  # an operation was submitted meanwhile
            self._break(self.failure)
            return
        try:
            requests = []
            while self._unsent:
                requests.append(self._unsent.popleft().request)
            for decisions in self._messages.exchange(requests):  # all ranks fuse the same
                for decision in decisions:
                    self._count_unnamed(decision.request)
                    self._execution.add(decision, self._entries)
                    if decision.request.kind == LEAVE.kind:
                        rank = self.ranks[decision.last_joined]
                        self._break(f"{_SHUT_DOWN}: rank {rank} has ended or called hvd.shutdown()")
                        return
                self._quiet(self._execution.run)
        except LostRankError as error:
            self._lose(error)
        except Exception as error:  # on this rank alone: from here on it would be out of step
            self._break(f"{type(error).__name__}: {error}", error)

    def _lose(self, error: LostRankError) -> None:
        """Let all operations fail, now and later."""
        self.has_lost, self.failure = True, str(error)
        self._on_loss()
        self._break(self.failure)

    def _check(self) -> None:
        """Look from time to time whether ranks were lost, or leave others waiting."""
        now_s = time.monotonic()
        if now_s < self._next_check_s or self.failure or not self._lock.acquire(blocking=False):
            return
        self._next_check_s = now_s + 0.1
        try:
            self._messages.mailbox.check()
            if (coordinator := self._messages.coordinator) is not None:
                for line in coordinator.find_late(self._settings.warn_s):
                    say(f"hpctrain.horovod: {line}", err=True)
                coordinator.give_up(self._settings.limit_s)
            elif self.world.rank == 1:  # one of those that wait for the coordinator
                self._warn_of_coordinator()
        except LostRankError as error:
            self._lose(error)
        finally:
            self._lock.release()

    def _warn_of_coordinator(self) -> None:
        """Name each operation that the coordinator leaves waiting, once; it has no thread then."""
        start_s = time.perf_counter() - self._settings.warn_s
        for entry in list(self._entries.values()):
            if entry.start_s < start_s and entry.request.kind != JOIN and not entry.is_reported:
                entry.is_reported = True
                say(
                    f"hpctrain.horovod: {entry.request.kind} '{entry.request.name}': submitted "
                    f"{self._settings.warn_s:.0f} s ago, not by all ranks; rank {self.ranks[0]} "
                    "has not answered",
                    err=True,
                )

    def _break(self, failure: str, cause: Exception | None = None) -> None:
        """Let all operations under way fail, and all later ones."""
        self.failure = failure
        self._unsent.clear()
        for entry in list(self._entries.values()):
            self._entries.pop(entry.request.name, None)
            entry.fail(failure, cause)

    def _run_thread(self) -> None:
        if self._gpu is not None:  # MPI needs CUDA's context in each thread that calls it
            gpus.use_gpu(self._gpu.ordinal)
        cycle_s = self._settings.cycle_s
        pace = Pace(min_nap_s=cycle_s, max_nap_s=cycle_s, polls=1)
        while not self._is_closed:
            self._wake.wait()
            self._wake.clear()
            time.sleep(cycle_s)  # more tensors are submitted meanwhile, and fused
            pace.until(self._advance, self._check)
