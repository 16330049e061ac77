"""A server's shard: one byte range of the parameters, with the optimizer's state for it.

Gradients come in slices and parameters go in slices, so that while one slice is updated the next
is on its way in and the one before on its way out:

    in       [ slice 2 ][ slice 1 ][ slice 0 ]
    update              [ slice 2 ][ slice 1 ][ slice 0 ]
    out                            [ slice 2 ][ slice 1 ][ slice 0 ]

Optimizers that need norms of whole tensors wait for all of the gradient first. The sum over
workers is made in their order and shards begin at blocks of the optimizers, so that the bytes
depend neither on the order of arrival nor on the number of servers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives.chunks import SEGMENT_BYTES, bounds
from hpctrain.core.xp import to_host
from hpctrain.engines.engine import BLOCK, fitting
from hpctrain.gradients.arena import Arena, relative_to
from hpctrain.optim import Optimizer
from hpctrain.optim.optimizer import State, Total
from hpctrain.transport.link import Link, Request

AHEAD = 2  #: slices whose receives are posted before they are needed


class Use(IntEnum):
    """How a server uses incoming gradients."""

    NONE = 0  #: none come
    DROP = 1  #: they are taken off the wire and forgotten
    ADD = 2  #: they are added up
    UPDATE = 3  #: they are added up, and the optimizer takes the sum
    ELASTIC = 4  #: what comes are parameters; see easgd.py
    LATE = 5  #: as DROP: they are of a step that was taken without them


class Order(NamedTuple):
    """The next action of a server: receive gradients of some workers, send parameters to some."""

    pushed: tuple[int, ...]  #: the workers whose gradients come now; empty with Use.NONE
    use: Use
    factor: float  #: multiplies each of these gradients
    pull: tuple[int, ...]  #: the workers that are sent the parameters after that
    over: bool  #: nothing more comes until the next meeting


def ranges(length: int, servers: int) -> list[slice]:
    """Return each server's range of a plane of `length` elements, even but for one block."""
    return [slice(a, b) for a, b in pairwise(bounds(length, servers, BLOCK))]


def slices(own: slice, itemsize: int) -> list[slice]:
    """Return the slices in which a range is sent."""
    step = SEGMENT_BYTES // itemsize
    return [slice(a, min(a + step, own.stop)) for a in range(own.start, own.stop, step)]


class Shard:
    """One server's range, its links to the workers and how it takes their gradients."""

    def __init__(
        self,
        arena: Arena,
        own: slice,
        optimizer: Optimizer,
        total: Total,
        push: Link,
        pull: Link,
        workers: Sequence[int],
        delay_compensation: float = 0.0,
        adds: bool = False,
    ):
        """Keep `own` of the arena's parameters; gradients come by `push`, answers go by `pull`.

        `workers` are their ranks. `delay_compensation` is the lambda of Zheng et al. (2017);
        `adds` says that orders to ADD may come, which need memory for a whole gradient.
        """
        # Of the host, wherever workers compute: a server is there for the memory and the cores.
        self.param = to_host(arena.param[own]).copy()
        self._own, self._length, self._total = own, arena.param.size, total
        self._optimizer, self._push, self._pull, self._workers = optimizer, push, pull, workers
        self._wire = [slice(s.start - own.start, s.stop - own.start)
                      for s in slices(own, self.param.itemsize)]  # fmt: skip
        self._whole = optimizer.needs_norms or adds
        self._sum = np.zeros(self.param.size if self._whole else 0, self.param.dtype)
        self._parts = [slice(0, self.param.size)] if self._whole else self._wire
        self._slots = [relative_to(own.start + part.start, arena.slots) for part in self._parts]
        self._states: list[State] = [optimizer.init(self.param[part]) for part in self._parts]
        longest = max((s.stop - s.start for s in self._wire), default=0)
        self._inbox = np.empty((AHEAD, len(workers), longest), self.param.dtype)
        self._outgoing: list[list[Request]] = [[] for _ in self._wire]
        self._lambda = delay_compensation
        self._before = [self.param.copy() for _ in workers] if delay_compensation else []

    def apply(self, order: Order) -> None:
        """Receive and use the gradients of `order`, then send the parameters to its workers."""
        takes = order.use in (Use.ADD, Use.UPDATE)
        for i, gradients in self._gradients(order.pushed):
            if takes:
                self._take(i, self._summed(i, gradients, order), order)
            if not self._whole:
                self._send(i, order.pull)
        if self._whole and order.use == Use.UPDATE:
            for requests in self._outgoing:
                finish(requests)
            self._update(0, self._sum)
            self._sum[...] = 0
        if self._whole or not order.pushed:
            for i in self._travel:
                self._send(i, order.pull)

    def rest(self) -> None:
        """Wait for all sends."""
        for requests in self._outgoing:
            finish(requests)

    def pieces(self) -> list[Piece]:
        """Return this shard's part of parameters and optimizer state, to be saved."""
        pieces = [Piece("param", self._own.start, self._length, self.param)]
        for part, state in zip(self._parts, self._states, strict=True):
            pieces += [
                Piece(f"optimizer.{name}", self._own.start + part.start, self._length, x)
                for name, x in state.items()
                if name != "step"
            ]
        if self._own.start == 0 and self.param.size:
            pieces.append(Piece("optimizer.step", 0, 1, self._states[0]["step"]))
        return pieces

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take this shard's part of full `arrays`, whose "param" is known to fit."""
        self.param[...] = arrays["param"][self._own]
        for part, state in zip(self._parts, self._states, strict=True):
            at = slice(self._own.start + part.start, self._own.start + part.stop)
            for name, x in state.items():
                size, own = (1, slice(1)) if name == "step" else (self._length, at)
                x[...] = fitting(arrays, f"optimizer.{name}", size)[own]
        for before in self._before:
            before[...] = self.param

    @property
    def _travel(self) -> range:
        """The slices as they travel, from the last on: backward makes them in this order."""
        return range(len(self._wire))[::-1]

    def _gradients(self, pushed: Sequence[int]) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Yield, slice by slice, the gradients of the workers `pushed`, in this order."""
        to_come = deque(self._travel if pushed else ())
        coming: deque[tuple[int, list[tuple[Request, np.ndarray]]]] = deque()
        while to_come or coming:
            while len(coming) < AHEAD and to_come:
                i = to_come.popleft()
                coming.append((i, self._receives(i, pushed)))
            i, receives = coming.popleft()
            for request, _ in receives:
                request.wait()
            yield i, [x for _, x in receives]

    def _receives(self, i: int, pushed: Sequence[int]) -> list[tuple[Request, np.ndarray]]:
        length = self._wire[i].stop - self._wire[i].start
        boxes = [self._inbox[i % AHEAD, w, :length] for w in pushed]
        pairs = zip(pushed, boxes, strict=True)
        return [(self._push.irecv(x, self._workers[w]), x) for w, x in pairs]

    def _summed(self, i: int, gradients: list[np.ndarray], order: Order) -> np.ndarray:
        """Return the sum of slice `i` over workers, in the first of them."""
        if self._lambda:
            for w, g in zip(order.pushed, gradients, strict=True):
                self._compensate(w, i, g)
        first, *rest = gradients
        for g in rest:
            first += g
        if order.factor != 1:
            first *= order.factor
        return first

    def _compensate(self, w: int, i: int, g: np.ndarray) -> None:
        """Compensate the delay of gradient `g`: g + lambda g g (w_now - w_then).

        Where the result is so large that a sum over workers may overflow, the slice stays as it is.
        """
        s = self._wire[i]
        moved = self.param[s] - self._before[w][s]
        with np.errstate(over="ignore", invalid="ignore"):
            moved *= g
            moved *= g
            moved *= self._lambda
            moved += g
        if isfinite(moved.dot(moved)):
            g[...] = moved

    def _take(self, i: int, gradient: np.ndarray, order: Order) -> None:
        if self._whole:
            self._sum[self._wire[i]] += gradient
        else:
            finish(self._outgoing[i])  # it may still be read by the wire
            self._update(i, gradient)

    def _update(self, part: int, gradient: np.ndarray) -> None:
        param, state = self.param[self._parts[part]], self._states[part]
        self._optimizer.update(gradient, state, param, self._slots[part], self._total)

    def _send(self, i: int, pull: Sequence[int]) -> None:
        """Send slice `i` of the parameters to the workers `pull`."""
        s = self._wire[i]
        for w in pull:
            self._outgoing[i].append(self._pull.isend(self.param[s], self._workers[w]))
            if self._before:
                self._before[w][s] = self.param[s]


def finish(requests: list[Request]) -> None:
    """Wait for all of `requests`, and forget them."""
    for request in requests:
        request.wait()
    requests.clear()
