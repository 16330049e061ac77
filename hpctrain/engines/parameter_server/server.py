"""The servers: the first one decides, and all apply its orders.

    server 0       receive a report -> event -> forward the order -> reply -> apply
    server 1 ...                                receive the order ->           apply

So all servers apply the same orders in the same sequence, in whatever order slices arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np

from hpctrain.core.errors import HpctrainError
from hpctrain.engines.engine import Flags
from hpctrain.engines.parameter_server.coordinator import Coordinator, Event
from hpctrain.engines.parameter_server.shard import Order, Shard, Use
from hpctrain.transport.link import Link, Request
from hpctrain.watch.trace import Category, Trace

T = TypeVar("T")
JOIN_LIMIT_S = 10.0
Events = Callable[[Coordinator], Iterator[Event]]


class Server:
    """One server: its shard, its link to the other servers and, on the first, the coordinator."""

    def __init__(
        self, shard: Shard, coordinator: Coordinator, servers: Link, workers: int, trace: Trace
    ):
        """`servers` links all servers; orders are recorded in `trace`."""
        self.shard, self.coordinator, self._trace = shard, coordinator, trace
        self.category: Category = "compute"  #: of its spans; "wire" in a thread beside a worker
        self.busy_s = 0.0  #: time spent on orders
        self._servers, self._workers = servers, workers
        self._sent: list[tuple[Request, np.ndarray]] = []

    @property
    def first(self) -> bool:
        return self._servers.rank == 0

    def serve(self, events: Events, own_flags: Callable[[], Flags] = Flags) -> list[Event]:
        """Serve until the interval ends; return its events on the first server, else an empty list.

        `own_flags()` returns the flags of a rank that only serves; the coordinator merges them.
        """
        if self.first:
            return list(self._coordinate(events, own_flags))
        order = self._next_order()
        while not order.last:
            self._apply(order)
            order = self._next_order()
        self._apply(order)
        self.shard.flush()
        return []

    def _coordinate(self, events: Events, own_flags: Callable[[], Flags]) -> Iterator[Event]:
        """Yield the events of an interval, each after it was applied."""
        self.coordinator.open(own_flags)
        for event in events(self.coordinator):
            self._forward(event.order)
            self.coordinator.send_replies(event.replies)
            self._apply(event.order, event.staleness)
            if not event.order.last:
                self.coordinator.expect_reports(event.replies)
            yield event
        self.shard.flush()

    def _apply(self, order: Order, staleness: int | None = None) -> None:
        start = perf_counter()
        self.shard.apply(order)
        args: dict[str, Any] = {"pushed": order.pushed, "pull": order.pull, "use": order.use.name}
        if staleness is not None:
            args["staleness"] = staleness
        self.busy_s += self._trace.add("serve", self.category, start, perf_counter(), args)

    def _forward(self, order: Order) -> None:
        """Send `order` to the other servers."""
        for request, _ in self._sent:  # the previous order: a server is at most one behind
            request.wait()
        x = _encode(order, self._workers)
        ranks = range(1, self._servers.size)
        self._sent = [(self._servers.isend(x, rank), x) for rank in ranks]
        if order.last:
            for request, _ in self._sent:
                request.wait()
            self._sent = []

    def _next_order(self) -> Order:
        x = _encode(Order(), self._workers)
        self._servers.irecv(x, 0).wait()
        return _decode(x)


class ServerThread(Generic[T]):
    """A thread that serves other ranks beside a worker, for one interval."""

    def __init__(self, serve: Callable[[], list[T]], failed: Callable[[BaseException], None]):
        """Start the thread; it calls `failed` with the exception that ends it."""
        self._result: list[T] = []
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = serve()
            except BaseException as error:
                self._error = error
                failed(error)

        self._thread = threading.Thread(target=run, name="server", daemon=True)
        self._thread.start()

    def join(self) -> list[T]:
        """Return the result of the thread; raise its exception."""
        self._thread.join(JOIN_LIMIT_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise HpctrainError("the server thread did not end after all workers were told to stop")
        return self._result


def _encode(order: Order, workers: int) -> np.ndarray:
    """Return `order` as float64 (3 + 2 workers): use, factor, last, two masks of workers."""
    masks = [[float(w in group) for w in range(workers)] for group in (order.pushed, order.pull)]
    return np.array([float(order.use), order.factor, float(order.last), *masks[0], *masks[1]])


def _decode(x: np.ndarray) -> Order:
    pushed, pull = (tuple(np.flatnonzero(mask).tolist()) for mask in x[3:].reshape(2, -1))
    return Order(pushed, Use(int(x[0])), float(x[1]), pull, bool(x[2]))
