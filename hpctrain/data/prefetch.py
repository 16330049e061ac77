"""Prefetching: a thread reads the next batches while the current one is computed.

Results do not change: batches come in the order of the steps, each is read once, and an error is
raised when its batch is requested.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from hpctrain.core.errors import HpctrainError
from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.reading import unwrap

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_AHEAD = 2  #: batches: one in use and one ready; more would only need memory
JOIN_TIMEOUT_S = 5.0  #: longest wait of `close` for a read that has not returned


def batches_to_read_ahead(samples: Samples) -> int:
    """Return the number of batches to read ahead.

    0 for samples in memory, and for sets whose `reads_ahead` is False.
    """
    # For samples in memory a second thread only competes with the main thread: with two ranks on
    # two cores a step of 1.4 ms on the digits took 3.1 ms.
    base = unwrap(samples)
    in_memory = isinstance(base, Dataset)
    return 0 if in_memory or not getattr(base, "reads_ahead", True) else MAX_AHEAD


class _ReadResult(NamedTuple):
    item: Any
    error: BaseException | None


def _refuse_to_read(step: int) -> NoReturn:
    raise HpctrainError(f"step {step} was to be read after the end of the training")


class Prefetch(Generic[T]):
    """The results of `read(step)` for `steps` in order, read up to `max_ahead` steps in advance.

    With `max_ahead` 0 each step is read on request, in the calling thread. A context manager, which
    ends the thread on exit.
    """

    def __init__(
        self,
        read: Callable[[int], T],
        steps: Iterable[int],
        max_ahead: int,
        timeout_s: float = 300.0,
    ) -> None:
        """Begin to read; `timeout_s` is the longest wait of `next`."""
        self._read, self._steps, self._timeout_s = read, iter(steps), timeout_s
        self._results: queue.SimpleQueue[_ReadResult] = queue.SimpleQueue()
        self._free_slots, self._is_closed = threading.Semaphore(max_ahead), False
        self._thread = None
        if max_ahead:
            self._thread = threading.Thread(
                target=self._read_ahead, name="hpctrain-reader", daemon=True
            )
            self._thread.start()

    def next(self) -> T:
        """Return the result of the next step; raise the error of `read`, or HpctrainError.

        Raises StopIteration after the last step.
        """
        if self._thread is None:
            return self._read(next(self._steps))
        try:
            result = self._results.get(timeout=self._timeout_s)
        except queue.Empty:
            raise HpctrainError(
                f"no batch was read within {self._timeout_s:g} s; is the file system of [data] "
                "answering?"
            ) from None
        if result.error is not None:
            self._results.put(result)  # the next call raises it again
            raise result.error
        self._free_slots.release()
        return result.item

    def close(self) -> None:
        """End the thread; give up after some seconds if a read does not return."""
        self._is_closed = True
        self._free_slots.release()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning("the thread that reads data did not end: a read has not returned")
        self._read = _refuse_to_read  # whose owner may own this object: it is free at once

    def _read_ahead(self) -> None:
        """Put the results of `read` as slots become free, until the last step or an error."""
        result = _ReadResult(None, None)
        while result.error is None and self._free_slots.acquire() and not self._is_closed:
            try:
                result = _ReadResult(self._read(next(self._steps)), None)
            except BaseException as error:  # including StopIteration after the last step
                result = _ReadResult(None, error)
            self._results.put(result)
