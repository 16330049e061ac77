"""The start of every operation of a process group: its order, its note for the watch, its Work.

Before data moves, all ranks compare a digest of the call where that costs a microsecond: within a
node, or with TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hpctrain.collectives import Group
from hpctrain.collectives.signature import Signature, make_signature, must_match
from hpctrain.torch.communicator import Communicator
from hpctrain.torch.progress import Operation
from hpctrain.torch.tensors import own_stream
from hpctrain.torch.work import FinishedWork, RunningWork
from hpctrain.watch.trace import Trace

Tensors: TypeAlias = Sequence[torch.Tensor]
_FINISHED = FinishedWork()
BATCHES_HINT = " (do ranks have different numbers of batches?)"


class Operations:
    """The operations of a process group, by family: base of reductions, movements, messages."""

    def __init__(self, communicator: Communicator):
        self.communicator = communicator
        self._compares_calls = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self._coalesced: list[RunningWork] | None = None
        self._backward = -1  # the number of the last backward pass with an operation

    @property
    def group(self) -> Group:
        """The ranks and their links."""
        return self.communicator.group

    def start(
        self,
        operation: bytes,
        nbytes: int,
        call: Callable[[], Any],
        tensors: Tensors,
        opts: Any,
        *,
        sources: Tensors = (),
    ) -> Any:
        """Run a collective, or start it where `opts` say that it is asynchronous; return its Work.

        `tensors`: the results. `sources`: what it reads, where a rank may have no result.
        """
        if torch.cuda.is_initialized():
            for tensor in (*tensors, *sources):
                if tensor.is_cuda:
                    call = partial(_call_in_stream, call, own_stream(tensor))
                    break
        if not getattr(opts, "asyncOp", True):  # from C++ it is asynchronous by default
            self.communicator.progress.run(operation, nbytes, call)
            return _FINISHED
        if self.communicator.trace.is_recording:
            self._record_wait(self.communicator.trace)
        if torch.is_inference_mode_enabled():  # each thread has a mode of its own
            call = torch.inference_mode()(call)
        work = self.communicator.progress.start(Operation(operation, nbytes, call), list(tensors))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _record_wait(self, trace: Trace) -> None:
        """Record the wait of DDP at the end of the backward pass that this call is in, once.

        A callback at that end comes before DDP's, which waits; one that it queues comes after.
        """
        task = torch._C._current_graph_task_id()
        if task in (-1, self._backward):
            return
        self._backward, queue = task, torch.autograd.Variable._execution_engine.queue_callback

        def begin() -> None:
            start_s = perf_counter()
            queue(lambda: trace.add("wait for gradients", "wait", start_s, perf_counter()))

        queue(begin)

    def signature(self, text: str) -> Signature | None:
        """Return the signature of a call if ranks compare them."""
        group = self.group
        cheap = len(group.nodes) == 1 and group.node_buffers is not None
        return make_signature(text, BATCHES_HINT) if cheap or self._compares_calls else None

    def must_match(self, text: str) -> None:
        """Raise UsageError on all ranks if calls differ, where that is compared."""
        if len(self.communicator.ranks) > 1 and (call := self.signature(text)) is not None:
            must_match(self.group, call)

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch: operations start at once here, so there is nothing to hold back."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """Return the work of the batch, which waits for all of its operations."""
        works, self._coalesced = self._coalesced or [], None
        return BatchWork(works)


def _call_in_stream(call: Callable[[], Any], stream: AbstractContextManager[None]) -> None:
    with stream:
        call()


class BatchWork(FinishedWork):
    """The operations of a batch, waited for together."""

    def __init__(self, works: Sequence[RunningWork]):
        super().__init__([tensor for work in works for tensor in work._tensors])
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each operation; raise the first error."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def for_each(function: Callable[..., Any], *lists: Iterable[Any]) -> None:
    """Call `function` with the first elements of all `lists`, then with the next ones."""
    for elements in zip(*lists, strict=True):
        function(*elements)


def total_bytes(tensors: Tensors) -> int:
    """Return the length of `tensors` together."""
    return sum(tensor.nbytes for tensor in tensors)


def describe(tensor: torch.Tensor) -> str:
    """Return the dtype, length and kind of device of a tensor, which ranks compare."""
    return f"{tensor.dtype} {tensor.numel()} on {tensor.device.type}"


def describe_kind(tensor: torch.Tensor) -> str:
    """Return the dtype and kind of device of a tensor whose length may differ between ranks."""
    return f"{tensor.dtype} on {tensor.device.type}"
