"""A worker pushes a gradient, or a sum of gradients, slice by slice from host memory.

On a device a slice is copied to pinned host memory on a separate stream, as soon as backward has
written it. When backward is complete and the gradient is known to be finite, the worker sends its
report and then the slices. Every worker sends the last layer's slices first: nearly all are copied
by then.

    backward, on the device    layer 3   layer 2   layer 1   layer 0
                                  |ready    |ready    |ready    |ready
    copies to the host            [ 5 ][ 4 ]  [ 3 ]      [ 2 ]     [ 1 ][ 0 ]
    wire                                               report, [ 5 ][ 4 ][ 3 ][ 2 ][ 1 ][ 0 ]

A server must apply no slice of a gradient that has a non-finite slice: so the report, with the
result of the check, precedes the first slice. No thread blocks on a stream or on the device: the
sender polls the copy of a slice, and drives the progress of its link meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpctrain.core.xp import Array, Event, event, on_device, pinned_like, stream_of_thread, wait_for
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import BucketProgress, cut_buckets
from hpctrain.gradients.replica import ignore_ready
from hpctrain.optim.absent import ABSENT
from hpctrain.transport.link import Link

ServerSlices = Sequence[tuple[int, slice]]  #: (serving rank, slice) in the order of sending


class GradientPush:
    """The gradients of a push."""

    def __init__(self, arena: Arena, server_slices: ServerSlices, accumulates: bool):
        """Push `arena.grad` in `server_slices`; with `accumulates` the sum of several gradients."""
        self._grad, self._server_slices = arena.grad, server_slices
        grad = arena.grad
        self._gradient_sum = np.full_like(grad, ABSENT) if accumulates else grad
        self._host_copy: HostCopy | None = None
        if on_device(arena.grad):
            # With a limit of 1 byte, each slot is a bucket.
            self._buckets = cut_buckets(arena.slots, arena.grad.size, arena.grad.itemsize, 1)
            self._progress = BucketProgress(self._buckets)
            self._host_copy = HostCopy(self._gradient_sum, [s for _, s in server_slices])

    def make_on_ready(self, is_last: bool) -> Callable[[str], None]:
        """Return `on_ready` for a backward pass; `is_last`: the last pass before a push."""
        return self._copy_ready_buckets if is_last and self._host_copy else ignore_ready

    def finish_gradient(self, is_last: bool) -> None:
        """Check that all slots of the last gradient are copied; add other gradients to the sum."""
        if is_last and self._host_copy:
            self._progress.finish_step()
        elif self._gradient_sum is not self._grad:
            self._gradient_sum += self._grad

    def slices(self, link: Link) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (rank, slice to send by `link`), each as soon as it is in host memory."""
        if self._host_copy is None:
            yield from ((rank, self._gradient_sum[s]) for rank, s in self._server_slices)
        else:
            for rank, s in self._server_slices:
                yield rank, self._host_copy.wait_for_slice(s, link)

    def clear(self) -> None:
        """Reset the sum, after all slices were sent."""
        if self._gradient_sum is not self._grad:
            self._gradient_sum[...] = ABSENT

    def _copy_ready_buckets(self, name: str) -> None:
        assert self._host_copy is not None
        for bucket_number in self._progress.mark_ready(name):
            bucket = self._buckets[bucket_number]
            if self._gradient_sum is not self._grad:
                part = slice(bucket.start, bucket.stop)
                self._gradient_sum[part] += self._grad[part]
            self._host_copy.start_copies(bucket.start)


class HostCopy:
    """The copy of a device's plane to host memory, slice by slice, from the end of the plane."""

    def __init__(self, plane: Array, slices: Sequence[slice]):
        """Copy `plane` in `slices` to pinned memory of the same length, owned by this object."""
        self._plane, self._host_plane = plane, pinned_like(plane)
        self._stream = stream_of_thread(plane)
        self._slices = sorted(slices, key=lambda s: s.start, reverse=True)
        self._uncopied_slices = list(self._slices)
        self._copy_events: dict[int, Event] = {}

    def start_copies(self, start: int) -> None:
        """Start to copy the slices from element `start` on, after writes in this thread's stream.

        The slice at element 0 is the last of a gradient; the next call belongs to the next one.
        """
        copyable_slices = [s for s in self._uncopied_slices if s.start >= start]
        if not copyable_slices:
            return
        write_event = event(self._plane)
        with self._stream:
            wait_for(write_event)
            for s in copyable_slices:
                self._plane[s].get(out=self._host_plane[s], blocking=False)
                self._copy_events[s.start] = event(self._plane)
        self._uncopied_slices = self._uncopied_slices[len(copyable_slices) :] or list(self._slices)

    def wait_for_slice(self, s: slice, link: Link) -> np.ndarray:
        """Wait for the copy of slice `s`, while `link` makes progress; return it."""
        copy_event = self._copy_events[s.start]
        link.endpoint.waits.wait_for(lambda: bool(copy_event.done), b"copy to the host")
        return self._host_plane[s]
