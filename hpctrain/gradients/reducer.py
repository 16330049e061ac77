"""The reducer sends gradients while backward still computes the layers before them.

    main thread           layer 3   layer 2   layer 1   layer 0   wait()   update
                             |ready    |ready              |ready    ^
    communication thread     [ bucket 0 ....... ][ bucket 1 ][ bucket 2 ]

One thread per rank does all communication of gradients, on its own link, with blocking algorithms:
MPI libraries seldom make progress in the background by themselves. Buckets are sent in one fixed
order, so every rank calls the same algorithms in the same order. If a thread is not worth its cost,
or MPI does not allow a second one, `wait` reduces the buckets in the calling thread.

An all-reduce may return the sum in another array, in the memory of a neighbour. Then `wait` returns
the neighbour's plane, and `release` lets the neighbour write there again.

The thread sums buckets as they become ready, or in another order that all ranks share.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from hpctrain.collectives import Group, Operation
from hpctrain.collectives.direct import direct_shared
from hpctrain.core import config
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.xp import Event, event, finish, own_stream, wait_for
from hpctrain.gradients.blocks import ReductionOptions
from hpctrain.gradients.buckets import Bucket, BucketProgress
from hpctrain.gradients.compress import CompressionOptions
from hpctrain.tuning.select import algorithm_name, bind, resolve_auto
from hpctrain.watch.trace import Trace

JOIN_TIMEOUT_S = 10.0
ALIVE_S = 2.0  # between two checks that the communication thread lives
#: An all-reduce; it returns the array with the sum, or None if that is the array of the call.
SumFunction = Callable[[Group, np.ndarray, Operation], np.ndarray | None]
#: Yields the number of each bucket to sum next, from a queue of ready buckets that ends with None;
#: collective over the group. The last argument is the number of buckets of a step.
SendOrder = Callable[["SimpleQueue[int | None]", Group, int], Iterator[int]]


def first_ready(
    ready_queue: SimpleQueue[int | None], group: Group, bucket_count: int
) -> Iterator[int]:
    """Return the buckets in the order in which they become ready, which all ranks share."""
    return iter(ready_queue.get, None)


def _check_bucket_bytes(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError("expected 'auto' or a number of bytes from 1 on")
    return value


#: Keys that need a sum of gradients in each step, with their defaults, which have no effect.
ALLREDUCE_ONLY_DEFAULTS = {"compression": "none", "reduction": "fast", "priority": False}


@config.options
class WireOptions(ReductionOptions, CompressionOptions):
    """The keys of `[wire]`: all-reduce, bucket length, overlap, order, compression."""

    algorithm: str = "auto"
    bucket_bytes: Annotated[Literal["auto"] | int, BeforeValidator(_check_bucket_bytes)] = "auto"
    overlap: Literal["auto", "always", "never"] = "auto"  #: send gradients during backward
    priority: bool = False  #: buckets that the next forward pass needs first are sent first

    def __post_init__(self) -> None:
        """Raise UsageError for keys that contradict each other."""
        ReductionOptions.__post_init__(self)
        CompressionOptions.__post_init__(self)
        if self.reduction == "ordered" and self.compression != "none":
            raise UsageError(
                "[wire] reduction: 'ordered' adds exact gradients; expected compression = "
                f"'none' beside it, seen '{self.compression}'"
            )
        if self.priority and self.overlap == "never":
            raise UsageError(
                "[wire] priority: expected overlap = 'auto' or 'always' beside it, seen 'never': "
                "it orders buckets that are sent during backward"
            )

    def must_have_defaults(
        self, engine: str, keys: Collection[str] = ALLREDUCE_ONLY_DEFAULTS.keys()
    ) -> None:
        """Raise UsageError if a key of `keys` is set, but `engine` does not sum gradients."""
        for key, default in ALLREDUCE_ONLY_DEFAULTS.items():
            if key in keys and getattr(self, key) != default:
                raise UsageError(
                    f"[wire] {key}: expected the engine 'allreduce', which sums a gradient in each "
                    f"step; seen '{engine}'; set {key} = {json.dumps(default)}"
                )


class BucketSum:
    """The sum of a bucket over all ranks: a bound call, and the array that holds its result."""

    def __init__(
        self, number: int, bucket: Bucket, grad: np.ndarray, group: Group, allreduce: SumFunction
    ):
        """Bind `allreduce` to the bucket's elements of `grad`; collective."""
        self.bucket, self.elements = bucket, grad[bucket.start : bucket.stop]
        self.total = self.elements
        self.is_complete = False  #: whether `total` holds the sum of this step
        function = resolve_auto(allreduce, group, self.elements, np.add)
        self.is_shared = function is direct_shared
        self.algorithm = algorithm_name(function, group, self.elements)
        # On a device, these events synchronize the streams of the two threads.
        self.written_event: Event = None
        self.sum_event: Event = None
        self._bound_call = bind(group, self.elements, np.add, function)
        self._span_name = f"bucket {number}"
        self._span_details = {"bytes": self.elements.nbytes, "algorithm": self.algorithm}

    def reduce(self, trace: Trace) -> float:
        """Sum the elements over all ranks, record a span, and return its seconds; collective."""
        wait_for(self.written_event)
        start = perf_counter()
        total = self._bound_call()
        self.total = self.elements if total is None else total
        seconds = trace.add(self._span_name, "wire", start, perf_counter(), self._span_details)
        self.sum_event = event(self.elements)
        return seconds


class Reducer:
    """Sums one plane of gradients over all ranks, bucket by bucket, once per step."""

    def __init__(
        self,
        grad: np.ndarray,
        buckets: Sequence[Bucket],
        group: Group,
        allreduce: SumFunction,
        concurrent: bool,
        *,
        trace: Trace | None = None,
        send_order: SendOrder = first_ready,
        check: Callable[[int, int], None] | None = None,
    ):
        """Reduce `grad` over `group`, whose link only this object may use from now on.

        `check(start, stop)` is called before these elements of `grad` are sent during backward.
        """
        self.wire_s = 0.0  #: time in collectives since the start
        self.sums = [BucketSum(i, x, grad, group, allreduce) for i, x in enumerate(buckets)]
        self._grad, self._group, self._trace = grad, group, trace or Trace()
        self._check_bucket = check
        self._shares_sums = any(bucket.is_shared for bucket in self.sums)
        neighbours = group.memory.neighbours(grad) if group.memory is not None else None
        self._first_plane = neighbours[0] if neighbours else grad  # of the node's first rank
        self._progress = BucketProgress(buckets)
        self.bucket_number = self._progress.bucket_number
        self._send_queue: SimpleQueue[int | None] = SimpleQueue()
        self._result_queue: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if concurrent:
            numbers = send_order(self._send_queue, group, len(buckets))
            thread_arguments = (weakref.ref(self), grad, numbers)
            self._thread = threading.Thread(
                target=_run_thread, args=thread_arguments, name="wire", daemon=True
            )
            weakref.finalize(self, self._send_queue.put, None)  # of a trainer that nobody closes
            self._thread.start()

    def mark_ready(self, name: str) -> None:
        """Mark slot `name` as final; send the buckets whose slots are all final."""
        for number in self._progress.mark_ready(name):
            if self._thread is not None:
                bucket_sum = self.sums[number]
                if self._check_bucket is not None:
                    self._check_bucket(bucket_sum.bucket.start, bucket_sum.bucket.stop)
                bucket_sum.written_event = event(self._grad)
                self._send_queue.put(number)

    def finish_backward(self) -> None:
        """Check that every slot was marked ready; after this, sums may be waited for."""
        self._progress.finish_step()
        for bucket_sum in self.sums:
            bucket_sum.is_complete = False

    def wait(self) -> np.ndarray:
        """Wait for all sums; return the plane that holds them, or raise an error of the thread."""
        self.finish_backward()
        for number in range(len(self.sums)):
            self.wait_for(number)
        remote_sums = [bucket for bucket in self.sums if bucket.total is not bucket.elements]
        if len(remote_sums) == len(self.sums):
            return self._first_plane
        for bucket in remote_sums:  # the returned plane must hold all sums
            bucket.elements[...] = bucket.total
        return self._grad

    def wait_for(self, number: int) -> np.ndarray:
        """Wait for the sum of bucket `number`; return the array that holds it."""
        bucket_sum = self.sums[number]
        while not bucket_sum.is_complete:
            self._receive_next()
        return bucket_sum.total

    def wait_for_any(self, candidates: Set[int], preferred: int) -> int:
        """Wait for one of `candidates`; return `preferred` if it is complete, else the last."""
        while not self._result_queue.empty():
            self._receive_next()
        while not (complete := [i for i in candidates if self.sums[i].is_complete]):
            self._receive_next()
        return preferred if preferred in complete else max(complete)

    def _receive_next(self) -> None:
        """Wait for the next bucket; raise its error if it failed."""
        if self._thread is None:
            bucket_sum = next(x for x in self.sums if not x.is_complete)
            self.wire_s += bucket_sum.reduce(self._trace)
        else:
            number, error = self._next_result(self._thread)
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its frames would hold it, and it them, and so this engine
            bucket_sum = self.sums[number]
            wait_for(bucket_sum.sum_event)
        bucket_sum.is_complete = True

    def _next_result(self, thread: threading.Thread) -> tuple[int, BaseException | None]:
        """Wait for a result of the communication thread; raise HpctrainError if it has ended."""
        while thread.is_alive():
            with suppress(Empty):
                return self._result_queue.get(timeout=ALIVE_S)
        if self._result_queue.empty():
            raise HpctrainError("the communication thread has ended; this rank printed its error")
        return self._result_queue.get()

    def release(self) -> None:
        """Wait until all ranks have read the sums, so gradients may be overwritten; collective."""
        if self._shares_sums and self._group.node_buffers is not None:
            finish(self._grad)  # kernels that are only queued in our stream still have to read
            self._group.node_buffers.flags.exchange()

    def close(self) -> None:
        """End the communication thread."""
        if self._thread is not None:
            self._send_queue.put(None)
            self._thread.join(JOIN_TIMEOUT_S)
            for bucket_sum in self.sums:  # nobody may have waited; their memory is given back
                wait_for(bucket_sum.sum_event)


def _run_thread(owner: weakref.ref[Reducer], grad: np.ndarray, numbers: Iterator[int]) -> None:
    """Reduce the queued buckets: the body of the communication thread.

    While it waits it holds no reference to the reducer, which could not end otherwise.
    """
    number, reducer = -1, None
    with own_stream(grad):
        while True:
            try:
                number = next(numbers)
                if (reducer := owner()) is None:
                    return
                reducer.wire_s += reducer.sums[number].reduce(reducer._trace)
                reducer._result_queue.put((number, None))
            except StopIteration:
                return
            except BaseException as error:  # wait() raises it again, in the main thread
                if (reducer := owner()) is not None:
                    reducer._result_queue.put((number, error))
            reducer = None
