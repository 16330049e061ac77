"""A server's shard: one byte range of the parameters, with the optimizer's state for it.

Gradients arrive and parameters leave in slices: while one slice is updated, the next is received
and the one before is sent:

    in       [ slice 2 ][ slice 1 ][ slice 0 ]
    update              [ slice 2 ][ slice 1 ][ slice 0 ]
    out                            [ slice 2 ][ slice 1 ][ slice 0 ]

Optimizers that need norms of whole tensors wait for the whole gradient. The sum over workers is
made in the order of workers, and shards begin at blocks of the optimizers, so that the bytes
depend neither on the order of arrival nor on the number of servers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives.chunks import SEGMENT_BYTES, bounds
from hpctrain.core.xp import to_host
from hpctrain.engines.engine import BLOCK
from hpctrain.engines.saved_state import SavedState
from hpctrain.gradients.arena import Arena, shift_slots
from hpctrain.optim import Optimizer
from hpctrain.optim.optimizer import GatherRows, State
from hpctrain.transport.link import Link, Request

AHEAD = 2  #: slices whose receives are posted before they are needed


class Use(IntEnum):
    """How a server uses incoming gradients."""

    NONE = 0  #: no gradient comes
    DROP = 1  #: receive and discard
    ADD = 2  #: add to the sum
    UPDATE = 3  #: add to the sum, and update with it
    ELASTIC = 4  #: parameters come instead; see easgd.py
    LATE = 5  #: as DROP: their step was taken without them


class Order(NamedTuple):
    """The next action of a server: receive gradients of some workers, send parameters to some."""

    pushed: tuple[int, ...] = ()  #: the workers whose gradients come now; empty with Use.NONE
    use: Use = Use.NONE
    factor: float = 1.0  #: multiplies each of these gradients
    pull: tuple[int, ...] = ()  #: the workers that receive the parameters afterwards
    last: bool = False  #: the last order of the interval


def ranges(length: int, servers: int) -> list[slice]:
    """Return each server's range of a plane of `length` elements, even but for one block."""
    return [slice(a, b) for a, b in pairwise(bounds(length, servers, BLOCK))]


def slices(own: slice, itemsize: int) -> list[slice]:
    """Return the slices in which the range `own` is sent."""
    step = SEGMENT_BYTES // itemsize
    return [slice(a, min(a + step, own.stop)) for a in range(own.start, own.stop, step)]


class Shard:
    """One server's range of the parameters, and its links to the workers."""

    def __init__(
        self,
        arena: Arena,
        own: slice,
        optimizer: Optimizer,
        *,
        total: GatherRows,
        push: Link,
        pull: Link,
        workers: Sequence[int],
        delay_compensation: float = 0.0,
        adds: bool = False,
    ):
        """Keep range `own` of the arena's parameters.

        Gradients arrive by `push`, parameters leave by `pull`; `workers` are ranks. `total` sums
        the rows of all shards. `delay_compensation` is the lambda of Zheng et al. (2017). With
        `adds` orders to ADD may come, which need memory for a whole gradient.
        """
        # In host memory, wherever workers compute: servers use the host's memory and cores.
        self.param = to_host(arena.param[own]).copy()
        self._own, self._length, self._total = own, arena.param.size, total
        self._optimizer, self._push, self._pull, self._workers = optimizer, push, pull, workers
        self._wire = [slice(s.start - own.start, s.stop - own.start)
                      for s in slices(own, self.param.itemsize)]  # fmt: skip
        self._whole_gradient = optimizer.needs_norms or adds
        self._sum = np.zeros(self.param.size if self._whole_gradient else 0, self.param.dtype)
        self._parts = [slice(0, self.param.size)] if self._whole_gradient else self._wire
        self._slots = [shift_slots(own.start + part.start, arena.slots) for part in self._parts]
        self._states: list[State] = [optimizer.init(self.param[part]) for part in self._parts]
        longest = max((s.stop - s.start for s in self._wire), default=0)
        self._inbox = np.empty((AHEAD, len(workers), longest), self.param.dtype)
        self._outgoing: list[list[Request]] = [[] for _ in self._wire]
        self._delay_compensation = delay_compensation
        self._params_at_pull = [self.param.copy() for _ in workers] if delay_compensation else []

    def apply(self, order: Order) -> None:
        """Receive and use the gradients of `order`, then send the parameters to its workers."""
        is_applied = order.use in (Use.ADD, Use.UPDATE)
        for i, gradients in self._gradients(order.pushed):
            if is_applied:
                self._use(i, self._summed(i, gradients, order), order)
            if not self._whole_gradient:
                self._send(i, order.pull)
        if self._whole_gradient and order.use == Use.UPDATE:
            for requests in self._outgoing:
                wait_all(requests)
            self._update(0, self._sum)
            self._sum[...] = 0
        if self._whole_gradient or not order.pushed:
            for i in self._send_order:
                self._send(i, order.pull)

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for requests in self._outgoing:
            wait_all(requests)

    def pieces(self) -> list[Piece]:
        """Return this shard's part of parameters and optimizer state, for a checkpoint."""
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

    def load(self, saved: SavedState) -> None:
        """Request this shard's part of parameters and optimizer state."""
        saved.request("param", self.param, self._own.start, self._length)
        for part, state in zip(self._parts, self._states, strict=True):
            for name, x in state.items():
                start = self._own.start + part.start
                offset, size = (0, 1) if name == "step" else (start, self._length)
                saved.request(f"optimizer.{name}", x, offset, size)
        for pulled_params in self._params_at_pull:
            saved.request("param", pulled_params, self._own.start, self._length)

    @property
    def _send_order(self) -> range:
        """The slices in the order of sending: the last first, as backward computes them."""
        return range(len(self._wire))[::-1]

    def _gradients(self, pushed: Sequence[int]) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Yield, slice by slice, the gradients of the workers `pushed`, in this order."""
        remaining = deque(self._send_order if pushed else ())
        posted_receives: deque[tuple[int, list[tuple[Request, np.ndarray]]]] = deque()
        while remaining or posted_receives:
            while len(posted_receives) < AHEAD and remaining:
                i = remaining.popleft()
                posted_receives.append((i, self._receives(i, pushed)))
            i, receives = posted_receives.popleft()
            for request, _ in receives:
                request.wait()
            yield i, [x for _, x in receives]

    def _receives(self, i: int, pushed: Sequence[int]) -> list[tuple[Request, np.ndarray]]:
        length = self._wire[i].stop - self._wire[i].start
        boxes = [self._inbox[i % AHEAD, w, :length] for w in pushed]
        pairs = zip(pushed, boxes, strict=True)
        return [(self._push.irecv(x, self._workers[w]), x) for w, x in pairs]

    def _summed(self, i: int, gradients: list[np.ndarray], order: Order) -> np.ndarray:
        """Return the sum of slice `i` over workers, written over the first of `gradients`."""
        if self._delay_compensation:
            for w, g in zip(order.pushed, gradients, strict=True):
                self._compensate(w, i, g)
        first, *others = gradients
        for g in others:
            first += g
        if order.factor != 1:
            first *= order.factor
        return first

    def _compensate(self, w: int, i: int, g: np.ndarray) -> None:
        """Compensate the delay of gradient `g`: g + lambda g g (w_now - w_then).

        Where the result is so large that a sum over workers may overflow, `g` stays as it is.
        """
        s = self._wire[i]
        corrected = self.param[s] - self._params_at_pull[w][s]
        with np.errstate(over="ignore", invalid="ignore"):
            corrected *= g
            corrected *= g
            corrected *= self._delay_compensation
            corrected += g
        if isfinite(corrected.dot(corrected)):
            g[...] = corrected

    def _use(self, i: int, gradient: np.ndarray, order: Order) -> None:
        if self._whole_gradient:
            self._sum[self._wire[i]] += gradient
        else:
            wait_all(self._outgoing[i])  # these sends still read the slice
            self._update(i, gradient)

    def _update(self, part: int, gradient: np.ndarray) -> None:
        param, state = self.param[self._parts[part]], self._states[part]
        self._optimizer.update(gradient, state, param, self._slots[part], self._total)

    def _send(self, i: int, pull: Sequence[int]) -> None:
        """Send slice `i` of the parameters to the workers `pull`."""
        s = self._wire[i]
        for w in pull:
            self._outgoing[i].append(self._pull.isend(self.param[s], self._workers[w]))
            if self._params_at_pull:
                self._params_at_pull[w][s] = self.param[s]


def wait_all(requests: list[Request]) -> None:
    """Wait for all of `requests`; clear the list."""
    for request in requests:
        request.wait()
    requests.clear()
