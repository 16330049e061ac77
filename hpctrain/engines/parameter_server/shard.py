"""A server's shard: one range of the parameters, and the optimizer's state of this range.

Gradients arrive and parameters leave in slices: while one slice is updated, the next is received
and the previous one is sent:

    in       [ slice 2 ][ slice 1 ][ slice 0 ]
    update              [ slice 2 ][ slice 1 ][ slice 0 ]
    out                            [ slice 2 ][ slice 1 ][ slice 0 ]

Optimizers that need norms of whole tensors wait for the whole gradient. Gradients are added in the
order of workers, and shards begin at blocks of the optimizers, so that the bytes depend neither on
the order of arrival nor on the number of servers.
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
from hpctrain.engines.parameter_server.roles import WorkerLinks
from hpctrain.engines.saved_state import SavedState, optimizer_pieces, plane_pieces, request_plane
from hpctrain.gradients.arena import Arena, shift_slots
from hpctrain.optim import Optimizer
from hpctrain.optim.absent import ABSENT
from hpctrain.optim.optimizer import BLOCK_ELEMENTS, GatherRows, State
from hpctrain.transport.link import Request, wait_all

RECEIVES_AHEAD = 2  #: the number of slices for which receives are posted in advance


class GradientAction(IntEnum):
    """How a server uses incoming gradients."""

    NONE = 0  #: no gradient arrives
    DROP = 1  #: receive and discard
    ADD = 2  #: add to the sum
    UPDATE = 3  #: add to the sum, and update with the sum
    ELASTIC = 4  #: parameters arrive instead; see easgd.py
    LATE = 5  #: as DROP: the step of these gradients was updated without them


class Order(NamedTuple):
    """The next action of a server: receive gradients of some workers, send parameters to some."""

    pushing_workers: tuple[int, ...] = ()  #: the workers whose gradients arrive
    action: GradientAction = GradientAction.NONE
    factor: float = 1.0  #: multiplies each gradient
    pulling_workers: tuple[int, ...] = ()  #: the workers that receive the parameters afterwards
    is_last: bool = False  #: the last order of the interval


def shard_ranges(length: int, servers: int) -> list[slice]:
    """Return each server's range of a plane of `length` elements; sizes differ by one block."""
    return [slice(start, stop) for start, stop in pairwise(bounds(length, servers, BLOCK_ELEMENTS))]


def wire_slices(own_range: slice, itemsize: int) -> list[slice]:
    """Return the slices in which the range `own_range` is sent."""
    length, stop = SEGMENT_BYTES // itemsize, own_range.stop
    return [slice(i, min(i + length, stop)) for i in range(own_range.start, stop, length)]


class Shard:
    """One server's range of the parameters, and its links to the workers."""

    def __init__(
        self,
        arena: Arena,
        own_range: slice,
        optimizer: Optimizer,
        links: WorkerLinks,
        *,
        gather_rows: GatherRows,
        delay_compensation: float = 0.0,
        accumulates: bool = False,
    ):
        """Keep the arena's parameters in `own_range`.

        `gather_rows` returns each shard's partial sums. `delay_compensation` is the lambda of
        Zheng et al. (2017). With `accumulates` the shard accepts orders to ADD, which need memory
        for a whole gradient.
        """
        # In host memory even if workers compute on GPUs: servers run on the cores of the host.
        self.param = to_host(arena.param[own_range]).copy()
        self._arena, self._own_range, self._gather_rows = arena, own_range, gather_rows
        self._optimizer, self._links = optimizer, links
        self._wire_slices = wire_slices(slice(0, self.param.size), self.param.itemsize)
        self._needs_whole_gradient = optimizer.needs_norms or accumulates
        sum_size = self.param.size if self._needs_whole_gradient else 0
        self._gradient_sum = np.full(sum_size, ABSENT, self.param.dtype)
        self._parts = (
            [slice(0, self.param.size)] if self._needs_whole_gradient else self._wire_slices
        )
        first = own_range.start
        self._slots = [shift_slots(first + part.start, arena.layout) for part in self._parts]
        self._states: list[State] = [optimizer.init(self.param[part]) for part in self._parts]
        max_length = max((s.stop - s.start for s in self._wire_slices), default=0)
        self._inbox = np.empty((RECEIVES_AHEAD, len(links.ranks), max_length), self.param.dtype)
        self._send_requests: list[list[Request]] = [[] for _ in self._wire_slices]
        #: the slices in the order of sending: the last first, as backward computes them
        self._send_order = range(len(self._wire_slices))[::-1]
        self._delay_compensation = delay_compensation
        self._params_at_pull = (
            [self.param.copy() for _ in links.ranks] if delay_compensation else []
        )

    def apply(self, order: Order) -> None:
        """Receive and use the gradients of `order`, then send the parameters to its workers."""
        adds_gradients = order.action in (GradientAction.ADD, GradientAction.UPDATE)
        for i, gradients in self._receive_gradients(order.pushing_workers):
            if adds_gradients:
                self._apply_sum(i, self._sum_gradients(i, gradients, order))
            if not self._needs_whole_gradient:
                self._send_slice(i, order.pulling_workers)
        if self._needs_whole_gradient and order.action == GradientAction.UPDATE:
            self.flush()
            self._update_part(0, self._gradient_sum)
            self._gradient_sum[...] = ABSENT
        if self._needs_whole_gradient or not order.pushing_workers:
            for i in self._send_order:
                self._send_slice(i, order.pulling_workers)

    def flush(self) -> None:
        """Wait until all sends are complete."""
        for requests in self._send_requests:
            drain(requests)

    def pieces(self) -> list[Piece]:
        """Return this shard's part of parameters and optimizer state, for a checkpoint."""
        pieces = plane_pieces(self._arena, "param", self.param, self._own_range.start)
        for part, state in zip(self._parts, self._states, strict=True):
            whole_slice = slice(0, part.stop - part.start)
            pieces += optimizer_pieces(
                self._arena, state, self._own_range.start + part.start, whole_slice
            )
        return pieces

    def load(self, saved: SavedState) -> None:
        """Request this shard's part of parameters and optimizer state."""
        for param in (self.param, *self._params_at_pull):
            request_plane(self._arena, "param", param, saved.request, self._own_range.start)
        for part, state in zip(self._parts, self._states, strict=True):
            start = self._own_range.start + part.start
            saved.request("optimizer.step", state["step"])
            for name, x in state.items():
                if name != "step":
                    request_plane(self._arena, f"optimizer.{name}", x, saved.request, start)

    def _receive_gradients(self, workers: Sequence[int]) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Yield (number of a slice, its gradients in the order of `workers`)."""
        slice_numbers = deque(self._send_order if workers else ())
        posted_slices: deque[tuple[int, list[tuple[Request, np.ndarray]]]] = deque()
        while slice_numbers or posted_slices:
            while len(posted_slices) < RECEIVES_AHEAD and slice_numbers:
                i = slice_numbers.popleft()
                posted_slices.append((i, [self._post_receive(i, worker) for worker in workers]))
            i, receives = posted_slices.popleft()
            wait_all([request for request, _ in receives])
            yield i, [gradient for _, gradient in receives]

    def _post_receive(self, i: int, worker: int) -> tuple[Request, np.ndarray]:
        length = self._wire_slices[i].stop - self._wire_slices[i].start
        gradient = self._inbox[i % RECEIVES_AHEAD, worker, :length]
        return self._links.push.irecv(gradient, self._links.ranks[worker]), gradient

    def _sum_gradients(self, i: int, gradients: list[np.ndarray], order: Order) -> np.ndarray:
        """Return the sum of slice `i` over workers; it overwrites the first of `gradients`."""
        if self._delay_compensation:
            for worker, gradient in zip(order.pushing_workers, gradients, strict=True):
                self._compensate_delay(worker, i, gradient)
        total, *other_gradients = gradients
        for gradient in other_gradients:
            total += gradient
        if order.factor != 1:
            total *= order.factor
        return total

    def _compensate_delay(self, worker: int, i: int, gradient: np.ndarray) -> None:
        """Compensate the delay of `gradient` in place: g + lambda g g (w_now - w_then).

        Keep the gradient if the result is so large that a sum over workers may overflow.
        """
        part = self._wire_slices[i]
        compensated = self.param[part] - self._params_at_pull[worker][part]
        with np.errstate(over="ignore", invalid="ignore"):
            compensated *= gradient
            compensated *= gradient
            compensated *= self._delay_compensation
            compensated += gradient
        if isfinite(compensated.dot(compensated)):
            np.copyto(gradient, compensated, where=gradient != 0)  # the mark ABSENT stays

    def _apply_sum(self, i: int, gradient: np.ndarray) -> None:
        if self._needs_whole_gradient:
            self._gradient_sum[self._wire_slices[i]] += gradient
        else:
            drain(self._send_requests[i])  # these sends still read the slice
            self._update_part(i, gradient)

    def _update_part(self, part: int, gradient: np.ndarray) -> None:
        param, state = self.param[self._parts[part]], self._states[part]
        self._optimizer.update(gradient, state, param, self._slots[part], self._gather_rows)

    def _send_slice(self, i: int, workers: Sequence[int]) -> None:
        """Send slice `i` of the parameters to `workers`."""
        part = self._wire_slices[i]
        for worker in workers:
            self._send_requests[i].append(
                self._links.pull.isend(self.param[part], self._links.ranks[worker])
            )
            if self._params_at_pull:
                self._params_at_pull[worker][part] = self.param[part]


def drain(requests: list[Request]) -> None:
    """Wait for all `requests`; clear the list."""
    wait_all(requests)
    requests.clear()
