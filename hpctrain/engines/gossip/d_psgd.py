"""Decentralised SGD: in each step a worker averages with its neighbours only.

    worker i    x_i -> neighbours, x_j <- neighbours      m_i = sum of W_ij x_j
                g_i = dL/dx_i on its share, meanwhile     x_i <- m_i - update(g_i)

W is doubly stochastic: the sum of all x is invariant, and the update of one worker spreads to all
others. With 4 workers:

    ring          W_ij = 1/3 for i, i - 1 and i + 1                  (sent per step: 2n)
    exponential   W_ij = 1/2 for i and i - 2^k, k = 0, 1, 0, 1, ...  (sent per step: n)

where n is the size of the parameters in bytes; log2 P steps of the exponential graph reach all P
workers. A worker waits only for its neighbours. A request to stop, or a failure, is sent with the
parameters as the step at which to end, late enough for the whole graph to receive it in time. The
gradient is scaled as in local SGD: with even shares it is the mean over the worker's samples.

Sources: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017;
Assran, Loizou, Ballas and Rabbat, "Stochastic gradient push for distributed deep learning", 2019,
of which the exponential graph is taken: with one peer a step its W is doubly stochastic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpctrain.core.xp import namespace
from hpctrain.engines.background import background_executor
from hpctrain.engines.engine import Flags, Work, join_flags
from hpctrain.engines.gossip.base import GossipEngine
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.transport.link import Request
from hpctrain.world import World

NEVER = 1 << 62


class Neighbours(NamedTuple):
    """The ranks that a worker sends to and receives from in a step; weights are even."""

    targets: tuple[int, ...]
    sources: tuple[int, ...]


class Graph(NamedTuple):
    """A graph of workers, as a function `neighbours(step, rank, ranks)`, and its diameter."""

    neighbours: Callable[[int, int, int], Neighbours]
    diameter: Callable[[int], int]  #: of a number of ranks: steps until all have received from each


def ring(step: int, rank: int, ranks: int) -> Neighbours:
    """Return the ranks before and after `rank`; of two ranks the other one."""
    pair = tuple(sorted({(rank - 1) % ranks, (rank + 1) % ranks}))
    return Neighbours(pair, pair)


def exponential(step: int, rank: int, ranks: int) -> Neighbours:
    """Return the rank at distance 1, 2, 4, ... in turn."""
    distance = 1 << step % (ranks - 1).bit_length()
    return Neighbours(((rank + distance) % ranks,), ((rank - distance) % ranks,))


GRAPHS = {
    "ring": Graph(ring, lambda ranks: ranks // 2),
    "exponential": Graph(exponential, lambda ranks: (ranks - 1).bit_length()),
}


class DPsgdEngine(GossipEngine):
    """See `hpctrain.engines.engine.Engine`."""

    asynchronous = False

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, graph: str):
        """Take part in `graph`, one of GRAPHS; collective."""
        super().__init__(world, replica, optimizer, f"gossip, graph {graph}")
        self._graph, self._link = GRAPHS[graph], world.link_for("gossip")
        self._links = [self._link]
        self._mean = np.zeros_like(replica.arena.param)
        self._executor = background_executor(world.concurrent, "gossip", self._mean)
        self._inbox = namespace(self._mean).zeros((2, self._mean.size), self._mean.dtype)
        self._end = NEVER  # the step at which all end, NEVER until this worker knows

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`."""
        step, flags, failed_at = start, Flags(), None
        self._restore_planes()
        self._end = NEVER
        while step < min(until, self._end):
            flags = flags.merged(work.flags())
            if flags.stop or failed_at is not None:
                self._end = min(self._end, step + self._graph.diameter(self.workers))
            if not self._step(work, step, failed_at is None) and failed_at is None:
                failed_at = step
            step += 1
        reached = step if failed_at is None else failed_at
        reached, flags = join_flags(self._group, reached, flags, failed_at is not None)
        if flags.failed:
            self.settle()
        return reached, flags

    def close(self) -> None:
        """End the thread and free its link; collective."""
        self._executor.shutdown()
        super().close()

    def _step(self, work: Work, step: int, trains: bool) -> bool:
        """Average; if this worker still `trains`, compute a gradient and apply it if finite.

        Return whether the worker goes on training.
        """
        task = work.task(step) if trains else None
        mixing = self._executor.submit(self._mix, step)
        # The mean over workers is to be the gradient of the batch, so each counts P times.
        result = self._gradient(task, task.scale * self.workers) if task else None
        with self._trace.span("wait for neighbours", "wait") as waiting:
            mixing.result()
        self.times.wait_s += waiting.seconds
        self.replica.arena.param[...] = self._mean
        if result is None:
            return False
        sums, passes = result
        if passes:
            self._update(self.replica.arena.param)
            work.record(step + 1, sums)
        return self.check.may_continue(passes, work.max_drops)

    def _mix(self, step: int) -> None:
        """Average with the neighbours of this step, and exchange the step at which to end."""
        link, x = self._link, self.replica.arena.param
        targets, sources = self._graph.neighbours(step, link.rank, link.size)
        with self._trace.span("gossip", "wire", bytes=x.nbytes * len(targets)) as wire:
            end, end_of_all = np.array([self._end]), np.zeros((len(sources), 1), np.int64)
            boxes = self._inbox[: len(sources)]
            requests: list[Request] = []
            for i, rank in enumerate(sources):
                requests += [link.irecv(end_of_all[i], rank), link.irecv(boxes[i], rank)]
            for rank in targets:
                requests += [link.isend(end, rank), link.isend(x, rank)]
            for request in requests:
                request.wait()
            self._end = min(self._end, int(end_of_all.min()))
            np.add(x, boxes[0], out=self._mean)
            for received in boxes[1:]:
                self._mean += received
            self._mean /= 1 + len(sources)
        self.times.wire_s += wire.seconds
