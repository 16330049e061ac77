"""Run calls in order in a background thread that has its own links."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from hpctrain.core.xp import Array, Event, event, finish, keep_stream, on_device, wait_for


def background_executor(use_thread: bool, name: str, x: Array) -> Executor:
    """Return an executor: one thread, or inline calls without `use_thread`.

    MPI libraries seldom make progress in the background: overlap of compute and communication needs
    a thread that waits for communication. The calls use arrays in the memory of `x`: on a device
    they run after the work queued in the caller's stream, and their future waits for the device.
    """
    if not use_thread:
        return _InlineExecutor()
    return _DeviceExecutor(name, x) if on_device(x) else ThreadPoolExecutor(1, name)


class _DeviceExecutor(Executor):
    """A thread with its own stream."""

    def __init__(self, name: str, x: Array):
        self._x = x
        self._thread = ThreadPoolExecutor(1, name, initializer=keep_stream, initargs=(x,))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of a call."""
        return self._thread.submit(self._run_call, event(self._x), fn, *args, **kwargs)

    def _run_call(
        self, inputs_ready: Event, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        wait_for(inputs_ready)
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
