"""Handles of operations under way, as `torch.distributed` expects them: `Work`.

PyTorch's own Work around a future swallows exceptions in `wait`; these raise them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from hpctrain.core.errors import TransportError
from hpctrain.torch.tensors import own_stream
from hpctrain.transport.mpi.tagged import TaggedMessages, TaggedRequest
from hpctrain.watch import Entry


class OperationWork(Work):
    """The handle of an operation whose results are tensors."""

    def __init__(self, tensors: Any = None):
        """`tensors`: the value of the future."""
        super().__init__()
        self._tensors = tensors

    def result(self) -> Any:
        """Return the list of result tensors, after a wait."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """Wait without a limit."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a future that holds the result tensors, after a wait."""
        future: Future[Any] = Future()
        future.set_result(self.result())
        return future


class FinishedWork(OperationWork):
    """An operation that was over when it returned."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> BaseException | None:
        return None


class RunningWork(OperationWork):
    """An operation that ends with a call of `finish` or `fail`, perhaps in another thread."""

    def __init__(self, tensors: Any, run: Callable[[RunningWork], None]):
        """`run(work)` runs the operation in the calling thread, unless another does so."""
        super().__init__(tensors)
        self._run = run
        self._error: BaseException | None = None
        self._is_over, self._end = threading.Event(), Future[Any]()
        # An exception given to a future by `set_exception` reaches Python alone; one that is raised
        # in a callback also C++, as where DDP waits.
        self._future = self._end.then(lambda _: self.result())

    def finish(self) -> None:
        """Let waits return, and the future have the result tensors."""
        self._is_over.set()
        self._end.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Let waits and the future raise `error`."""
        self._error = error
        self.finish()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the operation is over; raise its error, or TransportError after `timeout`.

        Without `timeout` the operation runs here, unless it is under way.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        if limit_s == 0.0:
            if not self._is_over.is_set():
                self._run(self)
        elif not self._is_over.wait(limit_s):
            raise TransportError(f"an operation was not over within {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def is_success(self) -> bool:
        return self._is_over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def get_future(self) -> Future[Any]:
        """Return the future of the result tensors."""
        return self._future


class Waits(Protocol):
    """The waits of a process group."""

    entry: Entry  #: of the watch's record
    limit_s: float  #: of a wait for other ranks
    messages: TaggedMessages


class MessageWork(OperationWork):
    """A tagged send or receive; the thread that waits drives it."""

    def __init__(
        self, request: TaggedRequest, tensor: torch.Tensor, target: torch.Tensor, waits: Waits
    ):
        """`tensor` holds the message; it is copied to `target` when the message has arrived."""
        super().__init__([target])
        self._request, self._tensor, self._target, self._waits = request, tensor, target, waits
        self._stream = own_stream(target)  # of the copy, after the present work of the caller

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the message is sent or received; raise TransportError after the limit.

        The limit is `timeout`, by default the group's.
        """
        request, entry = self._request, self._waits.entry
        limit_s = timeout.total_seconds() if timeout else self._waits.limit_s
        entry.enter(request.name.encode()[:24], request.peer, self._tensor.nbytes)
        try:
            if not request.wait(limit_s):
                raise TransportError(
                    f"rank {self._waits.messages.rank}: {request.name}: timed out after "
                    f"{limit_s:g} s: {self._tensor.nbytes} bytes, tag {request.tag}"
                )
        finally:
            entry.leave()
        self._copy_to_target()
        return True

    def is_completed(self) -> bool:
        return self._request.is_complete()

    is_success = is_completed

    def source_rank(self) -> int:
        """Return the rank that has sent the message."""
        return self._request.peer

    _source_rank = source_rank

    def _copy_to_target(self) -> None:
        if self._target is not self._tensor:
            with self._stream, torch.no_grad():
                self._target.copy_(self._tensor)
            self._tensor = self._target
