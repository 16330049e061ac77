"""The reducer: gradients are sent while backward still computes the layers before them.

    main thread           layer 3   layer 2   layer 1   layer 0   wait()   update
                             |ready    |ready              |ready    ^
    communication thread     [ bucket 0 ....... ][ bucket 1 ][ bucket 2 ]

One thread per rank does all the communication of gradients, on a link of its own, with blocking
algorithms: MPI libraries seldom make progress in the background by themselves. Buckets leave in
one fixed order, so every rank calls the same algorithms in the same order. Where a thread does not
pay, or MPI does not allow a second one, `wait` reduces the buckets in the calling thread.

An all-reduce may return another array that holds the sum, in the memory of a neighbour. Then
`wait` returns the neighbour's plane, and `release` lets the neighbour write there again.

With `priority` the buckets that the next forward pass needs first, those of the first layers, go
before others that wait as well. Which wait differs from rank to rank; so before each bucket the
ranks agree on how many are ready everywhere (a minimum, 8 bytes), and all take the last of these:

    ready on rank 0      0 1 2 3      agreed: 0 1 2      sent: 2, though 0 and 1 were there first
    ready on rank 1      0 1 2

Source: Jayarajan, Wei, Gibson, Fedorova and Pekhimenko, "Priority-based parameter propagation for
distributed DNN training", 2019. There slices of layers are exchanged, here whole buckets.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from queue import SimpleQueue
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator

from hpctrain import config
from hpctrain.collectives import Group, Operation
from hpctrain.collectives.direct import direct_shared
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Event, event, finish, own_stream, wait_for
from hpctrain.gradients.blocks import ReductionOptions
from hpctrain.gradients.buckets import Bucket, BucketProgress
from hpctrain.gradients.compress import CompressionOptions
from hpctrain.tuning.select import name_of, resolved
from hpctrain.watch.trace import Trace

JOIN_LIMIT_S = 10.0
#: An all-reduce that returns the array of the sum; None: the array of the call.
Sum = Callable[[Group, np.ndarray, Operation], np.ndarray | None]


def _auto_or_bytes(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError("expected 'auto' or a number of bytes from 1 on")
    return value


#: Keys that need a sum of gradients in each step, and their values without effect.
ALLREDUCE_ONLY = {"compression": "none", "reduction": "fast", "priority": False}


@config.options
class WireOptions(ReductionOptions, CompressionOptions):
    """The keys of `[wire]`: all-reduce, bucket length, overlap, order, compression."""

    algorithm: str = "auto"
    bucket_bytes: Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_bytes)] = "auto"
    overlap: Literal["auto", "always", "never"] = "auto"  #: gradients travel during backward
    priority: bool = False  #: buckets that the next forward pass needs first are sent first

    def __post_init__(self) -> None:
        """Refuse keys that contradict each other."""
        ReductionOptions.__post_init__(self)
        CompressionOptions.__post_init__(self)
        if self.reduction == "ordered" and self.compression != "none":
            raise UsageError(
                "[wire] reduction: 'ordered' adds gradients as they are; expected compression = "
                f"'none' beside it, seen '{self.compression}'"
            )
        if self.priority and self.overlap == "never":
            raise UsageError(
                "[wire] priority: expected overlap = 'auto' or 'always' beside it, seen 'never': "
                "it orders what travels while ranks compute"
            )

    def must_have_defaults(
        self, engine: str, keys: Collection[str] = ALLREDUCE_ONLY.keys()
    ) -> None:
        """Raise UsageError for keys of `keys` that `engine`, without sums of gradients, refuses."""
        for key, plain in ALLREDUCE_ONLY.items():
            if key in keys and getattr(self, key) != plain:
                raise UsageError(
                    f"[wire] {key}: expected the engine 'allreduce', which sums a gradient in each "
                    f"step; seen '{engine}'; set {key} = {json.dumps(plain)}"
                )


class Reducer:
    """Sums one plane of gradients over all ranks, bucket by bucket, once per step."""

    def __init__(
        self,
        grad: np.ndarray,
        buckets: Sequence[Bucket],
        group: Group,
        allreduce: Sum,
        concurrent: bool,
        trace: Trace | None = None,
        priority: bool = False,
        check: Callable[[int, int], None] | None = None,
    ):
        """Reduce `grad` over `group`, whose link this object's thread takes over.

        `check(start, stop)` is called before elements of `grad` leave during backward.
        """
        self.wire_s = 0.0  #: time in collectives since the start
        self._grad, self._group = grad, group
        self._trace, self._priority = trace or Trace(), priority
        self._slices = [grad[bucket.start : bucket.stop] for bucket in buckets]
        self._sums = list(self._slices)  # the array of each bucket's sum
        self._functions = [resolved(allreduce, group, x, np.add) for x in self._slices]
        pairs = list(zip(self._slices, self._functions, strict=True))
        self.algorithms = [name_of(function, group, x) for x, function in pairs]  #: of each bucket
        self._about = [
            {"bytes": x.nbytes, "algorithm": name}
            for x, name in zip(self._slices, self.algorithms, strict=True)
        ]
        neighbours = group.memory.neighbours(grad) if group.memory is not None else None
        self._first = neighbours[0] if neighbours else grad  # the plane of the node's first rank
        self._progress, self._buckets, self._check = BucketProgress(buckets), buckets, check
        self._send_queue: SimpleQueue[int | None] = SimpleQueue()
        self._result_queue: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()
        # On a device the streams of the two threads wait for each other, bucket by bucket.
        self._written: list[Event] = [None] * len(self._slices)
        self._summed: list[Event] = [None] * len(self._slices)
        self._summed_buckets: set[int] = set()  # buckets of this step whose sum has arrived
        self._thread: threading.Thread | None = None
        if concurrent:
            self._thread = threading.Thread(target=self._run, name="wire", daemon=True)
            self._thread.start()

    def ready(self, name: str) -> None:
        """Mark slot `name` as final; send the buckets that are full."""
        for number in self._progress.ready(name):
            if self._thread is not None:
                if self._check is not None:
                    self._check(self._buckets[number].start, self._buckets[number].stop)
                self._written[number] = event(self._grad)
                self._send_queue.put(number)

    def complete(self) -> None:
        """Check that every slot was ready; from now on sums may be waited for."""
        self._progress.complete()
        self._summed_buckets.clear()

    def wait(self) -> np.ndarray:
        """Return the plane of the sums, once all have arrived; raise an error of the thread."""
        self.complete()
        sums = [self.wait_for(number) for number in range(len(self._slices))]
        elsewhere = [(x, y) for x, y in zip(self._slices, sums, strict=True) if x is not y]
        if len(elsewhere) == len(sums):
            return self._first
        for own, total in elsewhere:  # a plane is to hold all
            own[...] = total
        return self._grad

    @property
    def count(self) -> int:
        return len(self._slices)

    def bucket(self, name: str) -> int | None:
        """Return the number of the bucket of slot `name`; None if it has none."""
        return self._progress.bucket(name)

    def wait_for(self, number: int) -> np.ndarray:
        """Return the array that holds the sum of bucket `number`, once it has arrived."""
        while number not in self._summed_buckets:
            self._next()
        return self._sums[number]

    def wait_for_any(self, due: Set[int], first: int) -> int:
        """Return bucket `first` if it is in, else the last of `due` that are; wait for one."""
        while not self._result_queue.empty():
            self._next()
        while not (arrived := self._summed_buckets & due):
            self._next()
        return first if first in arrived else max(arrived)

    def _next(self) -> None:
        """Receive the next bucket that has arrived; raise its error."""
        if self._thread is None:
            number = len(self._summed_buckets)
            self._reduce(number)
        else:
            number, error = self._result_queue.get()
            if error is not None:
                raise error
            wait_for(self._summed[number])
        self._summed_buckets.add(number)

    def release(self) -> None:
        """Wait until all ranks have read the sums: then gradients may be written; collective."""
        if direct_shared in self._functions and self._group.node_buffers is not None:
            finish(self._grad)  # a kernel queued in our stream has read nothing yet
            self._group.node_buffers.flags.exchange()

    def close(self) -> None:
        """End the communication thread."""
        if self._thread is not None:
            self._send_queue.put(None)
            self._thread.join(JOIN_LIMIT_S)

    def _run(self) -> None:
        """Reduce the buckets of the outbox: the body of the communication thread."""
        with own_stream(self._grad):
            self._run_all()

    def _run_all(self) -> None:
        numbers = self._by_priority() if self._priority else iter(self._send_queue.get, None)
        number = -1
        while True:
            try:
                number = next(numbers)
                wait_for(self._written[number])
                self._reduce(number)
                self._summed[number] = event(self._grad)
                self._result_queue.put((number, None))
            except StopIteration:
                return
            except BaseException as error:  # raised again by wait(), in the main thread
                self._result_queue.put((number, error))

    def _by_priority(self) -> Iterator[int]:
        """Yield the buckets of each step; of those ready on every rank, the last."""
        while True:
            left, ready = set(range(len(self._slices))), 0
            while left:
                # With a bucket to send: count all that are there; without: wait for one.
                while ready <= min(left) or not self._send_queue.empty():
                    number = self._send_queue.get()
                    if number is None:
                        return
                    ready = number + 1
                everywhere = self._ready_on_all(ready)
                number = max(i for i in left if i < everywhere)
                left.remove(number)
                yield number

    def _ready_on_all(self, ready: int) -> int:
        """Return the number of buckets that are ready on every rank."""
        count = np.array([ready])
        recursive_doubling(self._group, count, np.minimum)
        return int(count[0])

    def _reduce(self, number: int) -> None:
        start, own = perf_counter(), self._slices[number]
        total = self._functions[number](self._group, own, np.add)
        self._sums[number] = own if total is None else total
        name, about = f"bucket {number}", self._about[number]
        self.wire_s += self._trace.add(name, "wire", start, perf_counter(), about)
