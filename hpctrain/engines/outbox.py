"""What a worker pushes: its gradient, or the sum of several, slice by slice, out of the host.

On a device a slice goes to pinned memory of the host as soon as backward has made it, on a stream
of its own. When backward is done, and the gradient is known to be finite, the report leaves, and
behind it the slices, the last layer's first on all workers: nearly all of them are there by then.

    backward, on the device    layer 3   layer 2   layer 1   layer 0
                                  |ready    |ready    |ready    |ready
    copies to the host            [ 5 ][ 4 ]  [ 3 ]      [ 2 ]     [ 1 ][ 0 ]
    wire                                               report, [ 5 ][ 4 ][ 3 ][ 2 ][ 1 ][ 0 ]

A server takes no slice of a gradient that another slice shows to be not finite; so it hears of that
before the first comes. Nobody waits for a stream or for the device; who has a slice to send looks
whether it is there, and keeps the wire going meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpctrain.engines.engine import nobody_waits
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import Filling, cut
from hpctrain.transport.link import Link
from hpctrain.xp import Array, Event, another_stream, event, on_device, pinned_like, wait_for

Cut = Sequence[tuple[int, slice]]  #: which rank serves which slice, as they travel


class Outbox:
    """The gradients of one push."""

    def __init__(self, arena: Arena, cut_: Cut, adds: bool):
        """Push `arena.grad` along `cut_`; `adds`: the sum of several."""
        self._grad, self._cut = arena.grad, cut_
        self._sum = np.zeros_like(arena.grad) if adds else arena.grad
        self._landing: Landing | None = None
        if on_device(arena.grad):
            self._buckets = cut(arena.slots, arena.grad.size, arena.grad.itemsize, 1)  # a slot each
            self._filling = Filling(self._buckets)
            self._landing = Landing(self._sum, [s for _, s in cut_])

    def listener(self, last: bool) -> Callable[[str], None]:
        """Return what backward is to tell which slots are final; `last` before the push."""
        return self._ready if last and self._landing else nobody_waits

    def take(self, last: bool) -> None:
        """Take in the gradient that was computed, of which the listener was told."""
        if last and self._landing:
            self._filling.complete()
        elif self._sum is not self._grad:
            self._sum += self._grad

    def leave(self, link: Link) -> Iterator[tuple[int, np.ndarray]]:
        """Yield ranks and what they are sent by `link`, each slice when it is there."""
        if self._landing is None:
            yield from ((rank, self._sum[s]) for rank, s in self._cut)
        else:
            yield from ((rank, self._landing.wait(s, link)) for rank, s in self._cut)

    def clear(self) -> None:
        """Begin anew, once all has been sent."""
        if self._sum is not self._grad:
            self._sum[...] = 0

    def _ready(self, name: str) -> None:
        assert self._landing is not None
        for bucket in (self._buckets[number] for number in self._filling.ready(name)):
            if self._sum is not self._grad:
                at = slice(bucket.start, bucket.stop)
                self._sum[at] += self._grad[at]
            self._landing.begin(bucket.start)


class Landing:
    """A plane of a device on its way to the host, from its end on."""

    def __init__(self, plane: Array, slices: Sequence[slice]):
        """Copy `plane` in `slices`, as long as it is into pinned memory of this object's."""
        self._plane, self._host, self._stream = plane, pinned_like(plane), another_stream(plane)
        self._slices = sorted(slices, key=lambda s: s.start, reverse=True)
        self._left = list(self._slices)
        self._there: dict[int, Event] = {}

    def begin(self, start: int) -> None:
        """Begin to copy: from element `start` on this thread's stream will have written all.

        With the first element comes the last slice, and then the next plane may begin.
        """
        due = [s for s in self._left if s.start >= start]
        if not due:
            return
        made = event(self._plane)
        with self._stream:
            wait_for(made)
            for s in due:
                self._plane[s].get(out=self._host[s], blocking=False)
                self._there[s.start] = event(self._plane)
        self._left = self._left[len(due) :] or list(self._slices)

    def wait(self, s: slice, link: Link) -> np.ndarray:
        """Return the copy of slice `s` when it is there; what `link` has under way goes on."""
        there = self._there[s.start]
        link.wait_for(lambda: bool(there.done), b"copy to the host")
        return self._host[s]
