"""A background thread, which makes calls in order on links of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from hpctrain.core.xp import Array, Event, event, finish, keep_stream, on_device, wait_for


def background_executor(concurrent: bool, name: str, x: Array) -> Executor:
    """Return an executor: a helper thread, or inline calls if MPI lacks THREAD_MULTIPLE.

    MPI libraries seldom make progress in the background: to overlap compute and communication
    takes a thread that waits for the latter. The calls use arrays in the memory of `x`: on a device
    they run after the work queued in the caller's stream, and are complete when their future is.
    """
    if not concurrent:
        return _InlineExecutor()
    return _DeviceExecutor(name, x) if on_device(x) else ThreadPoolExecutor(1, name)


class _DeviceExecutor(Executor):
    """A thread with a stream of its own."""

    def __init__(self, name: str, x: Array):
        self._x = x
        self._thread = ThreadPoolExecutor(1, name, initializer=keep_stream, initargs=(x,))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of a call."""
        return self._thread.submit(self._call, event(self._x), fn, *args, **kwargs)

    def _call(self, before: Event, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wait_for(before)
        result = fn(*args, **kwargs)
        finish(self._x)
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread."""
        self._thread.shutdown(wait, cancel_futures=cancel_futures)


class _InlineExecutor(Executor):
    """Makes each call inside `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
