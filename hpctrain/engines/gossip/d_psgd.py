"""Decentralised SGD: in each step a worker averages with its neighbours only.

    worker i    x_i -> neighbours, x_j <- neighbours      m_i = sum of W_ij x_j
                g_i = dL/dx_i on its share, meanwhile     x_i <- m_i - update(g_i)

W is doubly stochastic: the sum of x over the workers is invariant, and a worker's update spreads to
all others. With 4 workers:

    ring          W_ij = 1/3 for i, i - 1 and i + 1                  (sent per step: 2n)
    exponential   W_ij = 1/2 for i and i - 2^k, k = 0, 1, 0, 1, ...  (sent per step: n)

where n is the size of the parameters in bytes; log2 P steps of the exponential graph reach all P
workers. A worker waits only for its neighbours. After a failure or a request to stop, workers send
the step at which to end with their parameters; it is late enough for the whole graph to receive it
in time. The gradient is scaled as in local SGD: with even shares it is the mean over the worker's
samples.

Sources: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", 2017;
Assran, Loizou, Ballas and Rabbat, "Stochastic gradient push for distributed deep learning", 2019,
for the exponential graph, whose W is doubly stochastic with one peer per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpctrain.core.xp import namespace
from hpctrain.engines.background import background_executor
from hpctrain.engines.engine import Flags, Work
from hpctrain.engines.gossip.base import GossipEngine
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.transport.link import Request, wait_all
from hpctrain.world import World

NO_END_STEP = 1 << 62


class Neighbours(NamedTuple):
    """The ranks to which a worker sends and from which it receives; all weights are equal."""

    targets: tuple[int, ...]
    sources: tuple[int, ...]


class Graph(NamedTuple):
    """A graph of workers, as a function `neighbours(step, rank, ranks)`, and its diameter."""

    neighbours: Callable[[int, int, int], Neighbours]
    diameter: Callable[[int], int]  #: from the number of ranks: steps until each has reached all


def ring_neighbours(step: int, rank: int, ranks: int) -> Neighbours:
    """Return the ranks before and after `rank`; on two ranks they are the same."""
    neighbours = tuple(sorted({(rank - 1) % ranks, (rank + 1) % ranks}))
    return Neighbours(neighbours, neighbours)


def exponential_neighbours(step: int, rank: int, ranks: int) -> Neighbours:
    """Return the ranks at distance 2^k, where k cycles with `step`."""
    distance = 1 << step % (ranks - 1).bit_length()
    return Neighbours(((rank + distance) % ranks,), ((rank - distance) % ranks,))


GRAPHS = {
    "ring": Graph(ring_neighbours, lambda ranks: ranks // 2),
    "exponential": Graph(exponential_neighbours, lambda ranks: (ranks - 1).bit_length()),
}


class DPsgdEngine(GossipEngine):
    """See `hpctrain.engines.engine.Engine`."""

    asynchronous = False

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, graph: str):
        """Take part in `graph`, one of GRAPHS; collective."""
        super().__init__(world, replica, optimizer, f"gossip, graph {graph}")
        self._graph, self._link = GRAPHS[graph], world.threads.link_for("gossip")
        self._links = [self._link]
        self._mean = np.zeros_like(replica.arena.param)
        self._executor = background_executor(world.concurrent, "gossip", self._mean)
        self._inbox = namespace(self._mean).zeros((2, self._mean.size), self._mean.dtype)
        self._end_step = NO_END_STEP  # the step at which all workers end, once this one knows it

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`."""
        step, flags, failed_step = start, Flags(), None
        self._train_apart()
        self._end_step = NO_END_STEP
        while step < min(until, self._end_step):
            flags = self._row.join(flags.merge(work.flags()))
            if flags.stop or failed_step is not None:
                self._end_step = min(self._end_step, step + self._graph.diameter(self.workers))
            if not self._train_step(work, step, failed_step is None) and failed_step is None:
                failed_step = step
            step += 1
        reached_step = step if failed_step is None else failed_step
        reached_step, flags = self._join_flags(reached_step, flags, failed_step is not None)
        if flags.failed:
            self.settle()
        return reached_step, flags

    def close(self) -> None:
        """End the thread and free its link; collective."""
        self._executor.shutdown()
        super().close()

    def _train_step(self, work: Work, step: int, is_training: bool) -> bool:
        """Average; with `is_training` also compute a gradient, and apply it if it is finite.

        Return whether this worker can continue training.
        """
        result = None
        task = work.task(step) if is_training else None
        averaging = self._executor.submit(self._average_with_neighbours, step)
        if task is not None:
            # The mean over workers must equal the gradient of the batch: scale each share by P.
            result = self._compute_gradient(task._replace(scale=task.scale * self.workers))
        with self.times.wait(self._trace, "wait for neighbours"):
            averaging.result()
        self.replica.arena.param[...] = self._mean
        if result is None:
            return False
        sums, is_finite = result
        if is_finite:
            self._apply_gradient(self.replica.arena.param)
            work.record(step + 1, sums)
        return self.check.may_continue(is_finite, work.max_drops)

    def _average_with_neighbours(self, step: int) -> None:
        """Average with the neighbours of this step; exchange the step at which to end."""
        link, param = self._link, self.replica.arena.param
        targets, sources = self._graph.neighbours(step, link.rank, link.size)
        with self._trace.span("gossip", "wire", bytes=param.nbytes * len(targets)) as wire_span:
            end_step, end_steps = np.array([self._end_step]), np.zeros((len(sources), 1), np.int64)
            receive_buffers = self._inbox[: len(sources)]
            requests: list[Request] = []
            for i, rank in enumerate(sources):
                requests += [link.irecv(end_steps[i], rank), link.irecv(receive_buffers[i], rank)]
            for rank in targets:
                requests += [link.isend(end_step, rank), link.isend(param, rank)]
            wait_all(requests)
            self._end_step = min(self._end_step, int(end_steps.min()))
            np.add(param, receive_buffers[0], out=self._mean)
            for neighbour_param in receive_buffers[1:]:
                self._mean += neighbour_param
            self._mean /= 1 + len(sources)
        self.times.wire_s += wire_span.seconds
