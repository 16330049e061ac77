"""The ranks of one process group: their links, and their collectives one after another.

    in the caller's thread        call | collective | return            a core for each rank
    in a communication thread     call | return ... wait |              cores to spare, or several
                                       | collective |                   nodes

MPI matches collectives by their order, so each communicator runs one at a time. A synchronous call
runs in the caller's thread, after those that the communication thread still has. Waits poll for a
moment and then nap, since ranks of users' programs share cores with their data loaders.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from hpctrain.collectives.dispatch import Choice, Choices
from hpctrain.collectives.native import native
from hpctrain.core.errors import LostRankError
from hpctrain.torch.job import end_after_loss
from hpctrain.torch.work import RunningWork
from hpctrain.transport.mpi.link import MpiLink
from hpctrain.transport.mpi.tagged import SPIN_S, TaggedMessages
from hpctrain.world import World

ALL_RANKS = -1
_MAX_GROUP_TAG = 16_383  # two tags for each group, below the 32,767 that every MPI has


class Communicator:
    """One rank's view of a process group."""

    def __init__(self, job: World, ranks: Sequence[int], name: str, limit_s: float, threaded: bool):
        """Make the links of `ranks` of `job`; collective over these.

        `limit_s`: of a wait for other ranks. `threaded`: whether asynchronous collectives run in a
        thread of their own.
        """
        assert job.record is not None  # ranks are processes
        self._job, self.ranks, self.limit_s = job, tuple(ranks), limit_s
        self._tag = 2 * (crc32(name.encode()) % _MAX_GROUP_TAG)
        self._threaded = threaded and len(self.ranks) > 1
        link = job.link.create_group(self.ranks, self._tag)
        self.messages = TaggedMessages(link, partial(end_after_loss, job))
        self.entry = job.record.entry("torch")
        self.world = self._make_world()
        self.group = self.world.main
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[tuple[bytes, int, Callable[[], Any], RunningWork] | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending = 0  # collectives of the thread; changed under `_count_lock`
        self._count_lock = threading.Lock()

    def _make_world(self) -> World:
        """Return the World of the ranks, whose links nap while they wait; collective."""
        world = self._job.over(self._job.link.create_group(self.ranks, self._tag + 1))
        main = replace(world.main, choices=_without_native(world.main.choices))
        if self._threaded:  # polls would hold the interpreter's lock
            main = replace(main, spins=False)
        world.main = main
        spin_s = 0.0 if self._threaded else SPIN_S  # polls of a thread would disturb compute
        for link in main.links:
            assert isinstance(link, MpiLink)
            link.nap_after(spin_s, self.limit_s)
        return world

    def run(self, operation: bytes, nbytes: int, call: Callable[[], Any]) -> None:
        """Run a collective to its end, after those that are under way."""
        if self._pending and threading.current_thread() is not self._thread:
            self.submit(operation, nbytes, call, []).wait()
            return
        self._run_in_order(operation, nbytes, call)

    def submit(
        self, operation: bytes, nbytes: int, call: Callable[[], Any], tensors: Any
    ) -> RunningWork:
        """Start a collective; `tensors` are its results. In the caller's thread it ends at once.

        So does one that the callback of a future starts in the communication thread itself.
        """
        work = RunningWork(tensors)
        if not self._threaded or threading.current_thread() is self._thread:
            self._run_work(operation, nbytes, call, work)
            return work
        with self._count_lock:
            self._pending += 1
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_queue, name="hpctrain-torch", daemon=True
            )
            self._thread.start()
        self._queue.put((operation, nbytes, call, work))
        return work

    def close(self) -> None:
        """Finish what is under way and free the links; all ranks of the group must call."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._job.sub_worlds.remove(self.world)
        self.group.free()
        self.messages.free()

    def _run_queue(self) -> None:
        while (item := self._queue.get()) is not None:
            self._run_work(*item)
            with self._count_lock:
                self._pending -= 1

    def _run_work(
        self, operation: bytes, nbytes: int, call: Callable[[], Any], work: RunningWork
    ) -> None:
        try:
            self._run_in_order(operation, nbytes, call)
        except Exception as error:
            work.fail(error)
        else:
            work.finish()

    def _run_in_order(self, operation: bytes, nbytes: int, call: Callable[[], Any]) -> None:
        """Call while no other collective of the group runs, with a note in the watch's record."""
        with self._lock, np.errstate(all="ignore"):  # as PyTorch, which does not warn of overflow
            self.entry.enter(operation, ALL_RANKS, nbytes)
            try:
                call()
            except LostRankError:
                end_after_loss(self._job)
            finally:
                self.entry.leave()


def _without_native(choices: Choices | None) -> Choices | None:
    """Return `choices` without MPI's own all-reduce, which waits without a nap."""
    if choices is None:
        return None

    def replaced(choice: Choice) -> Choice:
        default, in_memory = (
            choice.non_mpi if function is native else function
            for function in (choice.default, choice.in_node_memory)
        )
        return Choice(default, in_memory, choice.non_mpi)

    return replace(choices, choices=tuple(map(replaced, choices.choices)))
