"""The reducer: gradients go to the wire while backward still computes the layers before them.

    main thread           layer 3   layer 2   layer 1   layer 0   wait()   update
                             |ready    |ready              |ready    ^
    communication thread     [ bucket 0 ....... ][ bucket 1 ][ bucket 2 ]

One thread per rank does all the communication of gradients, on a link of its own, with blocking
algorithms: MPI libraries seldom make progress in the background by themselves. Buckets leave in
one fixed order, so every rank calls the same algorithms in the same order. Where MPI does not
allow a second thread, the buckets are reduced by `wait` in the calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Annotated

import numpy as np
from pydantic import Field

from hpctrain import config
from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.errors import HpctrainError, UsageError
from hpctrain.gradients.blocks import ReductionOptions
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.compress import CompressionOptions
from hpctrain.trace import Trace
from hpctrain.tuning.select import name_of

JOIN_LIMIT_S = 10.0


@config.options
class WireOptions(ReductionOptions, CompressionOptions):
    """The keys of `[wire]`: which all-reduce, how much travels at once, how small, what order."""

    algorithm: str = "auto"
    bucket_bytes: Annotated[int, Field(ge=1)] = 4 << 20

    def __post_init__(self) -> None:
        """Refuse keys that contradict each other."""
        ReductionOptions.__post_init__(self)
        CompressionOptions.__post_init__(self)
        if self.reduction == "ordered" and self.compression != "none":
            raise UsageError(
                "[wire] reduction: 'ordered' adds gradients as they are; expected compression = "
                f"'none' beside it, seen '{self.compression}'"
            )


class Reducer:
    """Sums one plane of gradients over all ranks, bucket by bucket, once per step."""

    def __init__(
        self,
        grad: np.ndarray,
        buckets: Sequence[Bucket],
        group: Group,
        allreduce: AllReduceFunction,
        concurrent: bool,
        trace: Trace | None = None,
    ):
        """Reduce `grad` in place over `group`, whose link this object's thread takes over."""
        self.wire_s = 0.0  #: time in collectives since the start
        self._grad, self._group, self._allreduce = grad, group, allreduce
        self._trace = trace or Trace()
        self._slices = [grad[bucket.start : bucket.stop] for bucket in buckets]
        self._about = [
            {"bytes": x.nbytes, "algorithm": name_of(allreduce, group, x)} for x in self._slices
        ]
        self._bucket_of = {name: i for i, b in enumerate(buckets) for name in b.names}
        self._names = [bucket.names for bucket in buckets]
        self._missing = [set(names) for names in self._names]
        self._sent = 0  # buckets handed to the wire in this step
        self._outbox: SimpleQueue[int | None] = SimpleQueue()
        self._arrived: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if concurrent:
            self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
            self._thread.start()

    def ready(self, name: str) -> None:
        """Take note that the gradient of slot `name` is final; send the buckets that are full."""
        missing = self._missing[self._bucket_of[name]]
        if name not in missing:
            raise HpctrainError(f"on_ready fired twice for slot '{name}'")
        missing.remove(name)
        while self._sent < len(self._slices) and not self._missing[self._sent]:
            if self._thread is not None:
                self._outbox.put(self._sent)
            self._sent += 1

    def wait(self) -> np.ndarray:
        """Return the plane that holds the sums, once all buckets are in; raise what went wrong."""
        if silent := sorted(set().union(*self._missing)):
            raise HpctrainError(f"on_ready never fired for slots: {', '.join(silent)}")
        for number in range(len(self._slices)):
            if self._thread is None:
                self._reduce(number)
            elif error := self._arrived.get():
                raise error
        self._missing, self._sent = [set(names) for names in self._names], 0
        return self._grad

    def close(self) -> None:
        """End the communication thread."""
        if self._thread is not None:
            self._outbox.put(None)
            self._thread.join(JOIN_LIMIT_S)

    def _carry(self) -> None:
        """Reduce what comes out of the outbox: the body of the communication thread."""
        while (number := self._outbox.get()) is not None:
            try:
                self._reduce(number)
                self._arrived.put(None)
            except BaseException as error:  # raised again by wait(), in the main thread
                self._arrived.put(error)

    def _reduce(self, number: int) -> None:
        start = perf_counter()
        self._allreduce(self._group, self._slices[number], np.add)
        name, about = f"bucket {number}", self._about[number]
        self.wire_s += self._trace.add(name, "wire", start, perf_counter(), about)
