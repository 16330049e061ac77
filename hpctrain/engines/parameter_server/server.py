"""The servers: the first one decides, and all apply its orders.

    server 0       receive a report -> event -> forward the order -> reply -> apply
    server 1 ...                                receive the order ->           apply

All servers apply the same orders in the same sequence, whatever the order in which slices arrive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np

from hpctrain.core.errors import HpctrainError, TransportError
from hpctrain.engines.engine import Flags
from hpctrain.engines.parameter_server.coordinator import Coordinator, Event
from hpctrain.engines.parameter_server.shard import GradientAction, Order, Shard
from hpctrain.transport.device import gpus
from hpctrain.transport.link import Link, Request, wait_all
from hpctrain.watch.trace import Category, Trace
from hpctrain.world import World

T = TypeVar("T")
JOIN_TIMEOUT_S = 10.0
EventSource = Callable[[Coordinator], Iterator[Event]]


class Server:
    """One server: its shard, its link to the other servers and, on the first, the coordinator."""

    def __init__(
        self, shard: Shard, coordinator: Coordinator, servers: Link, workers: int, trace: Trace
    ):
        """Serve `workers` workers; `servers` links the servers, on a mesh over all columns.

        Only the coordinator of its first rank is used.
        """
        self.shard, self.coordinator, self._trace = shard, coordinator, trace
        self.category: Category = "compute"  #: of trace spans; "wire" in a thread beside a worker
        self.busy_s = 0.0  #: the time of all orders
        self._servers, self._workers, self.first = servers, workers, servers.rank == 0
        self._pending_sends: list[tuple[Request, np.ndarray]] = []

    def serve(
        self, event_source: EventSource, read_own_flags: Callable[[], Flags] = Flags
    ) -> list[Event]:
        """Serve until the interval ends; the first server returns its events, the others [].

        `read_own_flags()` returns the flags of a rank that only serves, for the coordinator.
        """
        history: list[Event] = []
        if self.first:
            events = event_source(self.coordinator)
            history = self.coordinator.run(events, self._apply_event, read_own_flags)
        else:
            # Apply the orders of the first server, up to the last of the interval.
            is_last = False
            while not is_last:
                message = _encode_order(Order(), self._workers)
                self._servers.irecv(message, 0).wait()
                order = _decode_order(message)
                self._apply_order(order)
                is_last = order.is_last
        self.shard.flush()
        return history

    def _apply_event(self, event: Event) -> None:
        self._wait_for_sends()  # of the previous order: no server is more than one order behind
        message = _encode_order(event.order, self._workers)
        peers = range(1, self._servers.size)
        self._pending_sends = [(self._servers.isend(message, rank), message) for rank in peers]
        if event.order.is_last:
            self._wait_for_sends()
        self._apply_order(event.order, event.staleness)

    def _apply_order(self, order: Order, staleness: int | None = None) -> None:
        args: dict[str, Any] = {} if staleness is None else {"staleness": staleness}
        with self._trace.span(
            "serve",
            self.category,
            pushed=order.pushing_workers,
            pull=order.pulling_workers,
            use=order.action.name,
            **args,
        ) as serving:
            self.shard.apply(order)
        self.busy_s += serving.seconds

    def _wait_for_sends(self) -> None:
        wait_all([request for request, _ in self._pending_sends])
        self._pending_sends = []


class Outcome(Generic[T]):
    """The result of a thread, or the exception that ended it.

    A Future would keep the exception, whose traceback has the frames that have the Future: of a
    lost rank's engine all memory would stay until a collector of garbage runs.
    """

    def __init__(self) -> None:
        self._values: list[T] = []
        self._error: BaseException | None = None

    def run(self, function: Callable[[], T], on_failure: Callable[[BaseException], None]) -> None:
        """Call `function`, and `on_failure` with its exception."""
        try:
            self._values.append(function())
        except BaseException as error:
            self._error = error
            on_failure(error)

    def result(self) -> T:
        """Return the result; raise the exception once."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        return self._values[0]


@contextmanager
def server_thread(serve: Callable[[], T], world: World) -> Iterator[Outcome[T]]:
    """Call `serve()` in a thread beside the enclosed block; yield its outcome.

    The thread calls `world.fail` with the exception that ends it, which is raised again here.
    """

    def serve_with_context() -> T:
        if world.gpu is not None:  # this thread's MPI calls may move other threads' GPU messages
            gpus.use_gpu(world.gpu.ordinal)
        return serve()

    outcome = Outcome[T]()
    thread = threading.Thread(
        target=outcome.run, args=[serve_with_context, world.fail], name="server", daemon=True
    )
    thread.start()
    try:
        yield outcome
    except TransportError:  # perhaps because the thread has failed
        _join_thread(thread, outcome)
        raise
    _join_thread(thread, outcome)


def _join_thread(thread: threading.Thread, outcome: Outcome[Any]) -> None:
    thread.join(JOIN_TIMEOUT_S)
    if thread.is_alive():
        raise HpctrainError("the server thread did not end after all workers were told to stop")
    outcome.result()  # raises the exception of the thread


def _encode_order(order: Order, workers: int) -> np.ndarray:
    """Return `order` as float64 (3 + 2 workers): action, factor, is_last, two masks of workers."""
    pushing = [float(worker in order.pushing_workers) for worker in range(workers)]
    pulling = [float(worker in order.pulling_workers) for worker in range(workers)]
    return np.array([float(order.action), order.factor, float(order.is_last), *pushing, *pulling])


def _decode_order(message: np.ndarray) -> Order:
    action, factor, is_last = message[:3].tolist()
    pushing, pulling = (tuple(np.flatnonzero(mask).tolist()) for mask in message[3:].reshape(2, -1))
    return Order(pushing, GradientAction(int(action)), factor, pulling, bool(is_last))
