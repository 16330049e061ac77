"""One reader per node: a rank reads ahead for all ranks of its node, into memory that they share.

    rank 0, its thread    read fill 2 -> slot 0      read fill 3 -> slot 1      ...
    ranks 0, 1, 2, 3      train on fill 1, slot 1    train on fill 2, slot 0

A rank trains on its part of a slot without a copy, and releases the slot when it asks for a step of
a later fill; the reader writes to a slot once all ranks have released it. Counters in the same
memory (transport/shared_memory/flags.py) hold the number of fills read, and released by each rank.
No process is started, nothing is pickled. See `hpctrain.data.node_rows` for what a fill is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from hpctrain import data
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.names import counted
from hpctrain.core.trees import map_arrays
from hpctrain.data.node_rows import FillReader, Shares, SlotLayout, choose_layout, describe
from hpctrain.data.prefetch import JOIN_TIMEOUT_S
from hpctrain.data.reading import chunk_rows_of, own_way_of
from hpctrain.training.fit import FitSegment
from hpctrain.transport.pace import Pace
from hpctrain.transport.shared_memory.flags import WORDS_PER_LINE, NodeCounters
from hpctrain.transport.shared_memory.host import aligned_zeros
from hpctrain.world import World

log = logging.getLogger(__name__)
#: counters: fills read, an error, pieces of fills read, fills released by rank 0, ...
FILLED, ENDED, PIECES, RELEASED = 0, 1, 2, 3
RELEASE_NAP_S, OWN_NAP_S = 5e-4, 1e-3
PROGRESS_PART = 0.25  #: of the limit of a wait, after which a piece that was read restarts it


class _Node(NamedTuple):
    """The memory that the ranks of a node share, and the ranks that read and train."""

    layout: SlotLayout
    counters: np.ndarray  #: see NodeCounters
    slots: list[tuple[Any, Any]]
    reader: int  #: the rank that reads, as in the World
    trainers: tuple[int, ...]  #: the local ranks that train


class NodeReader:
    """A rank's end of the reader of its node; belongs to the main thread."""

    def __init__(self, segment: FitSegment, first: int, node: _Node):
        """Begin to read from step `first` on, in the rank that reads."""
        self._segment, self._world, self._node = segment, segment.world, node
        self._counters = NodeCounters(node.counters)
        self._fills = node.layout.fills(segment.sampler, first, segment.total_steps)
        self._fill, self._number = range(first, first), -1  # the fill in use
        self._changed, self._is_closed = threading.Condition(), False
        self.has_failed = False  #: whether rows that this rank asked for could not be read
        self.error: BaseException | None = None  #: the reason, in the rank that reads
        self._thread: threading.Thread | None = None
        if node.reader == self._world.rank:
            steps = node.layout.fills(segment.sampler, first, segment.total_steps)
            self._thread = threading.Thread(
                target=self._read_ahead, args=(steps,), name="hpctrain-reader", daemon=True
            )
            self._thread.start()

    def rows(self, step: int, samples: int) -> tuple[Any, Any]:
        """Return (x, y) of the `samples` of this worker's share of `step`, until the next call.

        If they could not be read, `has_failed` is set, and the rows hold any samples, or zeros.
        """
        while step >= self._fill.stop:
            self._number += 1
            self._counters.write(RELEASED + self._world.local_rank, self._number)
            self._fill = next(self._fills)
        if self._counters.read(FILLED) <= self._number:
            self._wait()
        layout = self._node.layout
        worker_row = layout.first_rows[self._segment.engine.worker or 0]
        row = (step - self._fill.start) * layout.first_rows[-1] + worker_row
        slot = self._node.slots[self._number % layout.slots]
        return map_arrays(lambda x: x[row : row + samples], slot)

    def close(self) -> None:
        """End the thread of the rank that reads; give up after some seconds."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning("the thread that reads data did not end: a read has not returned")

    def _wait(self) -> None:
        """Wait for the fill in use, or for the reader's error."""
        wait_for = self._world.link.endpoint.waits.wait_for
        while not self._has_come():  # each wait has the whole limit, and a record of its own
            wait_for(self._limit_wait(), b"read by the node", self._node.reader)
        self.has_failed = self._counters.read(FILLED) <= self._number

    def _has_come(self) -> bool:
        read = self._counters.read
        return read(FILLED) > self._number or bool(read(ENDED))

    def _limit_wait(self) -> Callable[[], bool]:
        """Return the condition of a wait that ends with the fill, or early if the reader goes on.

        The rank that reads sleeps in it, and raises after the limit.
        """
        timeout_s = self._segment.fit.options.timeout_s
        pieces, start_s = self._counters.read(PIECES), perf_counter()

        def may_end() -> bool:
            if self._counters.read(PIECES) == pieces:
                return self._has_come()
            return self._has_come() or perf_counter() > start_s + PROGRESS_PART * timeout_s

        def may_end_after_nap() -> bool:
            is_late = perf_counter() > start_s + timeout_s
            with self._changed:  # polls would keep the interpreter's lock from the thread
                if self._changed.wait_for(may_end, OWN_NAP_S):
                    return True
            if is_late:
                raise HpctrainError(
                    f"no batch was read within {timeout_s:g} s by rank {self._node.reader} on "
                    f"{self._world.host}, which reads {describe(self._segment.fit.train)} for its "
                    "node; is the file system of [data] answering?"
                )
            return False

        return may_end if self._thread is None else may_end_after_nap

    def _read_ahead(self, fills: Iterator[range]) -> None:
        """Read the fills in order, each as soon as its slot is free; in a thread."""
        layout, slots = self._node.layout, self._node.slots
        counters, pace = NodeCounters(self._node.counters), Pace.of_naps(RELEASE_NAP_S)
        pieces = count(1)
        reader = FillReader(
            self._segment.fit.train,
            self._segment.sampler,
            layout,
            lambda: self._publish(counters, PIECES, next(pieces)),
        )
        try:
            for number, steps in enumerate(fills):
                pace.until(partial(self._may_fill, counters, number))
                if self._is_closed:
                    return
                reader.read(steps, slots[number % layout.slots])
                self._publish(counters, FILLED, number + 1)
        except BaseException as error:  # raised on all ranks where its fill is used
            self.error = error
            self._publish(counters, ENDED, 1)

    def _may_fill(self, counters: NodeCounters, number: int) -> bool:
        """Return whether the slot of fill `number` is free, or the training ends."""
        before = number - self._node.layout.slots  # the fill that the slot has
        releases = (counters.read(RELEASED + rank) for rank in self._node.trainers)
        return self._is_closed or all(released > before for released in releases)

    def _publish(self, counters: NodeCounters, counter: int, count: int) -> None:
        with self._changed:
            counters.write(counter, count)
            self._changed.notify_all()


@contextmanager
def open_reader(segment: FitSegment, first: int) -> Iterator[NodeReader | None]:
    """Yield this rank's end of its node's reader from step `first` on; collective.

    None where each rank reads its own rows. Raises UsageError on all ranks if `[data] reader` asks
    for a reader that cannot be.
    """
    is_wanted = segment.world.on_all_ranks(partial(_wants_reader, segment))
    limit = data.reading_of(segment.fit.train).read_ahead_bytes
    if not is_wanted and segment.world.rank == 0 and limit != data.ReadOptions().read_ahead_bytes:
        log.warning("[data] read_ahead_bytes is not used: each rank reads its own rows")
    node = _make_node(segment, first) if is_wanted else None
    if node is None:
        yield None
        return
    if segment.world.rank == 0:
        ahead = f"{node.layout.slots} x {counted(node.layout.steps, 'step')}"
        log.info("[data] reader: one rank of each node reads for all of its ranks, %s ahead", ahead)
    reader = NodeReader(segment, first, node)
    try:
        yield reader
    finally:
        reader.close()


def _wants_reader(segment: FitSegment) -> bool:
    """Return whether ranks of a node are to share a reader; raise UsageError if they cannot."""
    train, fit = segment.fit.train, segment.fit
    wish, is_first = data.reading_of(train).reader, segment.world.rank == 0
    if wish == "rank" or (wish == "auto" and chunk_rows_of(train) is None):
        return False
    if not data.batches_to_read_ahead(train):
        if is_first:
            log.warning("[data] reader = 'node' is not used: the training samples lie in memory")
        return False
    obstacle = ""
    if not segment.engine.keeps_step:
        obstacle = f"with engine '{segment.engine.name}', whose workers may be at different steps"
    elif fit.options.prefetch is not None:
        obstacle = "beside [run] prefetch, the batches that each rank reads ahead by itself"
    elif own_way_of(train):
        return False
    if obstacle and wish == "node":
        raise UsageError(f"[data] reader: expected 'rank' {obstacle}, seen 'node'")
    return not obstacle


def _make_node(segment: FitSegment, first: int) -> _Node | None:
    """Return the memory and the roles of this node's ranks, None if they train nothing; collective.

    Also None, after a warning, where there is no shared memory, or too little of it by default.
    """
    world, engine, train = segment.world, segment.engine, segment.fit.train
    worker = -1 if engine.worker is None else engine.worker
    facts = all_gather_bytes(world.node, b"%d %d" % (world.rank, worker))
    ranks, workers = zip(*(map(int, fact.split()) for fact in facts), strict=True)
    trainers = tuple(i for i, worker in enumerate(workers) if worker >= 0)
    own_workers = tuple(sorted({workers[i] for i in trainers}))
    shares, reading = Shares(own_workers, engine.workers, segment.blocks), data.reading_of(train)

    def choose() -> SlotLayout | None:
        if not trainers:
            return None
        steps, max_bytes = segment.total_steps - first, reading.read_ahead_bytes
        try:
            return choose_layout(train, segment.sampler, shares, max_bytes, steps)
        except UsageError as error:
            if reading.reader == "node":
                raise
            _announce(world, f"{error}; each rank reads its own rows")
            return None

    layout = world.on_all_ranks(choose)
    # A rank alone may fail to read the first sample; what follows is collective.
    have_layouts = all_gather_bytes(world.node, b"" if layout is None else b"1")
    if layout is None or not all(have_layouts):
        return None
    counter_bytes = (RELEASED + world.node.size) * WORDS_PER_LINE * np.uint64().itemsize
    memory = _allocate(world, counter_bytes + layout.slots * layout.slot_bytes)
    if memory is None:
        _announce(world, "the ranks of the node share no memory; each reads its own rows")
        return None
    slots = memory[counter_bytes:].reshape(layout.slots, layout.slot_bytes)
    return _Node(
        layout,
        memory[:counter_bytes].view(np.uint64),
        list(map(layout.arrays, slots)),
        ranks[trainers[0]],
        trainers,
    )


def _allocate(world: World, nbytes: int) -> np.ndarray | None:
    """Return zeros (nbytes,) uint8 for all ranks of the node, None if it shares no memory."""
    if world.node.size == 1:
        return aligned_zeros(nbytes, np.uint8)
    return world.memory.common_zeros(nbytes, np.uint8)


def _announce(world: World, text: str) -> None:
    if world.local_rank == 0:
        log.warning("on %s: %s", world.host, text)
