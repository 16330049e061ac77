"""A thread beside the main one, which does one thing after the other on links of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from hpctrain.xp import Array, Event, event, finish, keep_stream, on_device, wait_for


def aside(concurrent: bool, name: str, x: Array) -> Executor:
    """Return what `submit` gives calls to; where threads may not communicate, they are made there.

    MPI libraries seldom make progress in the background: who wants to compute while something
    travels needs a thread that waits for it. The calls are about arrays where `x` is: on a device
    they come after what the caller's stream was given, and are done when their future is.
    """
    if not concurrent:
        return _AtOnce()
    return _OnDevice(name, x) if on_device(x) else ThreadPoolExecutor(1, name)


class _OnDevice(Executor):
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


class _AtOnce(Executor):
    """Makes each call when it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
