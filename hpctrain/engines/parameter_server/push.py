"""The gradient that a worker pushes, or the sum of several, sent slice by slice from host memory.

On a device a slice is copied to pinned host memory as soon as backward has written it, on a stream
of its own. When backward is complete and the gradient was checked to be finite, the worker sends
its report and then the slices, the last layer's first on all workers: nearly all are copied by
then.

    backward, on the device    layer 3   layer 2   layer 1   layer 0
                                  |ready    |ready    |ready    |ready
    copies to the host            [ 5 ][ 4 ]  [ 3 ]      [ 2 ]     [ 1 ][ 0 ]
    wire                                               report, [ 5 ][ 4 ][ 3 ][ 2 ][ 1 ][ 0 ]

A server must apply no slice of a gradient of which another slice is not finite: so the report, with
the result of the check, precedes the first slice. No thread blocks on a stream or on the device:
the sender polls the copy of a slice, and drives the progress of its link meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpctrain.core.xp import Array, Event, event, on_device, pinned_like, stream_of_thread, wait_for
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import BucketProgress, cut_buckets
from hpctrain.gradients.replica import ignore_ready
from hpctrain.transport.link import Link

Cut = Sequence[tuple[int, slice]]  #: (serving rank, slice) in the order of sending


class GradientPush:
    """The gradients of one push."""

    def __init__(self, arena: Arena, cut_: Cut, adds: bool):
        """Push `arena.grad` in the slices `cut_`; if it `adds`, the sum of several gradients."""
        self._grad, self._cut = arena.grad, cut_
        self._sum = np.zeros_like(arena.grad) if adds else arena.grad
        self._host_copy: HostCopy | None = None
        if on_device(arena.grad):
            # With a limit of 1 byte, each slot is a bucket.
            self._buckets = cut_buckets(arena.slots, arena.grad.size, arena.grad.itemsize, 1)
            self._progress = BucketProgress(self._buckets)
            self._host_copy = HostCopy(self._sum, [s for _, s in cut_])

    def on_ready_for(self, is_last: bool) -> Callable[[str], None]:
        """Return the `on_ready` of a backward pass; `is_last`: the last one before a push."""
        return self._copy_ready if is_last and self._host_copy else ignore_ready

    def add(self, is_last: bool) -> None:
        """Complete a gradient: check that all its slots are copied, or add it to the sum."""
        if is_last and self._host_copy:
            self._progress.finish_step()
        elif self._sum is not self._grad:
            self._sum += self._grad

    def slices(self, link: Link) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (rank, slice to send by `link`), each as soon as it is in host memory."""
        if self._host_copy is None:
            yield from ((rank, self._sum[s]) for rank, s in self._cut)
        else:
            yield from ((rank, self._host_copy.wait(s, link)) for rank, s in self._cut)

    def clear(self) -> None:
        """Reset the sum, after all slices were sent."""
        if self._sum is not self._grad:
            self._sum[...] = 0

    def _copy_ready(self, name: str) -> None:
        assert self._host_copy is not None
        for bucket in (self._buckets[number] for number in self._progress.mark_ready(name)):
            if self._sum is not self._grad:
                bucket_slice = slice(bucket.start, bucket.stop)
                self._sum[bucket_slice] += self._grad[bucket_slice]
            self._host_copy.begin(bucket.start)


class HostCopy:
    """The copy of a device's plane to host memory, slice by slice, from the end of the plane."""

    def __init__(self, plane: Array, slices: Sequence[slice]):
        """Copy `plane` in `slices` to pinned memory of the same length, owned by this object."""
        self._plane, self._host, self._stream = plane, pinned_like(plane), stream_of_thread(plane)
        self._slices = sorted(slices, key=lambda s: s.start, reverse=True)
        self._unsent_slices = list(self._slices)
        self._copied: dict[int, Event] = {}

    def begin(self, start: int) -> None:
        """Start the copies from element `start` on, after the writes in this thread's stream.

        The slice with the first element is the last one; the next gradient may then begin.
        """
        sendable = [s for s in self._unsent_slices if s.start >= start]
        if not sendable:
            return
        written = event(self._plane)
        with self._stream:
            wait_for(written)
            for s in sendable:
                self._plane[s].get(out=self._host[s], blocking=False)
                self._copied[s.start] = event(self._plane)
        self._unsent_slices = self._unsent_slices[len(sendable) :] or list(self._slices)

    def wait(self, s: slice, link: Link) -> np.ndarray:
        """Wait for the copy of slice `s`, while `link` makes progress; return it."""
        copied = self._copied[s.start]
        link.wait_for(lambda: bool(copied.done), b"copy to the host")
        return self._host[s]
