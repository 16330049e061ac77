"""A thread beside the main one, which does one thing after the other on links of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any


def aside(concurrent: bool, name: str) -> Executor:
    """Return what `submit` gives calls to; where threads may not communicate, they are made there.

    MPI libraries seldom make progress in the background: who wants to compute while something
    travels needs a thread that waits for it.
    """
    return ThreadPoolExecutor(1, name) if concurrent else _AtOnce()


class _AtOnce(Executor):
    """Makes each call when it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
