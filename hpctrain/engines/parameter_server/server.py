"""The servers: the first one decides, and all apply its orders.

    server 0       receive a report -> event -> forward the order -> reply -> apply
    server 1 ...                                receive the order ->           apply

All servers apply the same orders in the same sequence, whatever the order in which slices arrive.
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
from hpctrain.engines.parameter_server.shard import GradientAction, Order, Shard
from hpctrain.transport.link import Link, Request
from hpctrain.watch.trace import Category, Trace

T = TypeVar("T")
JOIN_TIMEOUT_S = 10.0
EventSource = Callable[[Coordinator], Iterator[Event]]


class Server:
    """One server: its shard, its link to the other servers and, on the first, the coordinator."""

    def __init__(
        self, shard: Shard, coordinator: Coordinator, servers: Link, workers: int, trace: Trace
    ):
        """Serve `workers` workers; `servers` is the link between servers."""
        self.shard, self.coordinator, self._trace = shard, coordinator, trace
        self.category: Category = "compute"  #: of trace spans; "wire" in a thread beside a worker
        self.busy_s = 0.0  #: the time of all orders
        self._servers, self._workers = servers, workers
        self._pending_sends: list[tuple[Request, np.ndarray]] = []

    @property
    def first(self) -> bool:
        return self._servers.rank == 0

    def serve(
        self, events: EventSource, read_own_flags: Callable[[], Flags] = Flags
    ) -> list[Event]:
        """Serve until the interval ends; return its events, on other servers than the first none.

        `read_own_flags()` returns the flags of a rank that only serves, for the coordinator.
        """
        if self.first:
            return list(self._run_coordinator(events, read_own_flags))
        order = self._receive_order()
        while not order.is_last:
            self._apply_order(order)
            order = self._receive_order()
        self._apply_order(order)
        self.shard.flush()
        return []

    def _run_coordinator(
        self, events: EventSource, read_own_flags: Callable[[], Flags]
    ) -> Iterator[Event]:
        """Yield the events of an interval, each after it was applied."""
        self.coordinator.begin_interval(read_own_flags)
        for event in events(self.coordinator):
            self._forward_order(event.order)
            self.coordinator.send_replies(event.replies)
            self._apply_order(event.order, event.staleness)
            if not event.order.is_last:
                self.coordinator.expect_reports(event.replies)
            yield event
        self.shard.flush()

    def _apply_order(self, order: Order, staleness: int | None = None) -> None:
        start = perf_counter()
        self.shard.apply(order)
        span_args: dict[str, Any] = {
            "pushed": order.pushing_workers,
            "pull": order.pulling_workers,
            "use": order.action.name,
        }
        if staleness is not None:
            span_args["staleness"] = staleness
        self.busy_s += self._trace.add("serve", self.category, start, perf_counter(), span_args)

    def _forward_order(self, order: Order) -> None:
        """Send `order` to the other servers."""
        self._wait_for_sends()  # of the previous order: no server is more than one order behind
        message = _encode_order(order, self._workers)
        peers = range(1, self._servers.size)
        self._pending_sends = [(self._servers.isend(message, rank), message) for rank in peers]
        if order.is_last:
            self._wait_for_sends()

    def _wait_for_sends(self) -> None:
        for request, _ in self._pending_sends:
            request.wait()
        self._pending_sends = []

    def _receive_order(self) -> Order:
        message = _encode_order(Order(), self._workers)
        self._servers.irecv(message, 0).wait()
        return _decode_order(message)


class ServerThread(Generic[T]):
    """A thread that serves other ranks beside a worker, for one interval."""

    def __init__(self, serve: Callable[[], list[T]], on_failure: Callable[[BaseException], None]):
        """Start the thread; it calls `on_failure` with the exception that ends it."""
        self._result: list[T] = []
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = serve()
            except BaseException as error:
                self._error = error
                on_failure(error)

        self._thread = threading.Thread(target=run, name="server", daemon=True)
        self._thread.start()

    def join(self) -> list[T]:
        """Return the result of the thread; raise its exception."""
        self._thread.join(JOIN_TIMEOUT_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise HpctrainError("the server thread did not end after all workers were told to stop")
        return self._result


def _encode_order(order: Order, workers: int) -> np.ndarray:
    """Return `order` as float64 (3 + 2 workers): action, factor, is_last, two masks of workers."""
    pushing = [float(worker in order.pushing_workers) for worker in range(workers)]
    pulling = [float(worker in order.pulling_workers) for worker in range(workers)]
    return np.array([float(order.action), order.factor, float(order.is_last), *pushing, *pulling])


def _decode_order(message: np.ndarray) -> Order:
    action, factor, is_last = message[:3].tolist()
    pushing, pulling = (tuple(np.flatnonzero(mask).tolist()) for mask in message[3:].reshape(2, -1))
    return Order(pushing, GradientAction(int(action)), factor, pulling, bool(is_last))
