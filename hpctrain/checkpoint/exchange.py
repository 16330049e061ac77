"""The exchange of extents: one rank sends an extent to the ranks that request its elements.

Four ranks, an array of eight extents that all request, and one in four parts:

    extents            p0  p1  p2  p3  p4  p5  p6  p7     s0  s1  s2  s3
    sent by rank        0   1   2   3   0   1   2   3      0   1   2   3
    round 0            p0..p3: each loads one, writes it into its array, sends it on
    round 1            p4..p7
    round 2            s0..s3: nobody else requests them

Within a round rank r sends to r + 1, r + 2, ... while it receives from r - 1, r - 2, ...: each link
carries one extent at a time, and both ends of a message are at the same place of the order, so that
a send may wait for its receive. Memory beside the arrays: one extent loaded and one received; none
is received apart from its array if a single target takes it unchanged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain.collectives.group import Scratch
from hpctrain.core.xp import copy, like
from hpctrain.transport.link import Link, Request, wait_all

RankSpans = list[list[Any]]  #: the requests of a rank: [array, first element, end]


class Extent(Protocol):
    """Consecutive elements of an array, which travel in one message."""

    @property
    def array(self) -> str:
        """The name of the array."""

    @property
    def dtype(self) -> str:
        """The dtype of the array."""

    @property
    def start(self) -> int:
        """The first element."""

    @property
    def stop(self) -> int:
        """The end: the index after the last element."""

    @property
    def nbytes(self) -> int:
        """The length in bytes."""


class Target(NamedTuple):
    """A request: elements from `start` on of an array, to be written into `out`."""

    turn: int
    array: str
    start: int
    out: Any

    @property
    def span(self) -> tuple[int, str, int, int]:
        """The turn, the array, its first element, and the end."""
        return self.turn, self.array, self.start, self.start + self.out.size

    def write(self, start: int, values: Any) -> None:
        """Write or add the `values` of the array from element `start` on, as far as requested."""
        begin = max(start, self.start)
        end = min(start + values.size, self.start + self.out.size)
        x = self.out[begin - self.start : end - self.start]
        new_values = values[begin - start : end - start]
        if self.turn:
            x += like(x, new_values)
        else:
            copy(x, new_values)

    def inbox(self, extent: Extent) -> np.ndarray | None:
        """Return the bytes of `out` that `extent` fills unchanged; None if it does not."""
        begin, end = extent.start - self.start, extent.stop - self.start
        if self.turn or type(self.out) is not np.ndarray or not 0 <= begin < end <= self.out.size:
            return None
        fits = self.out.flags.c_contiguous and self.out.dtype == extent.dtype
        return self.out[begin:end].view(np.uint8) if fits else None


@dataclass
class Read:
    """An extent, the ranks that request its elements, and the requests of this rank."""

    extent: Any
    ranks: set[int] = field(default_factory=set)
    targets: list[Target] = field(default_factory=list)


class Exchange:
    """The messages of a rank, and its first fault.

    A fault does not stop the exchange, in which other ranks wait.
    """

    def __init__(self, link: Link, load: Callable[[Any], np.ndarray]):
        """`load` returns the bytes of an extent, in memory of the host."""
        self.fault: Exception | None = None
        self.link, self.load = link, load
        self._buffer = partial(Scratch().host_buffer, dtype=np.dtype(np.uint8))

    def run_guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return `call(*arguments)`; keep the first error instead of raising it."""
        try:
            return call(*arguments)
        except Exception as error:  # other ranks wait for this one in the exchange
            self.fault = self.fault or error
            return None

    def run(self, reads_by_rank: Sequence[Sequence[Read]]) -> None:
        """Exchange extents between the ranks: rank r sends the extents of `reads_by_rank[r]`."""
        rank, size = self.link.rank, self.link.size
        for round_reads in zip_longest(*reads_by_rank):
            own_read, data = round_reads[rank], None
            if own_read is not None:
                data = self.load(own_read.extent)
                self._write(own_read, data)
            for distance in range(1, size):
                destination, source = (rank + distance) % size, (rank - distance) % size
                outgoing = data if own_read is not None and destination in own_read.ranks else None
                incoming = round_reads[source]
                if incoming is not None and rank not in incoming.ranks:
                    incoming = None
                self._exchange_extents(outgoing, destination, incoming, source)

    def _exchange_extents(
        self, outgoing: np.ndarray | None, destination: int, incoming: Read | None, source: int
    ) -> None:
        """Send an extent to `destination`, and receive an extent from rank `source`, if any."""
        requests: list[Request] = []
        inbox = buffer = None
        if incoming is not None:
            targets, extent = incoming.targets, incoming.extent
            # The place of the extent in its only target, if it fits there.
            inbox = targets[0].inbox(extent) if len(targets) == 1 else None
            buffer = self._buffer(extent.nbytes) if inbox is None else inbox
            requests.append(self.link.irecv(buffer, source))
        if outgoing is not None:
            requests.append(self.link.isend(outgoing, destination))
        wait_all(requests)
        if incoming is not None and inbox is None:
            self._write(incoming, buffer)

    def _write(self, read: Read, data: Any) -> None:
        values = data.view(read.extent.dtype)
        for target in read.targets:
            self.run_guarded(target.write, read.extent.start, values)


def plan_reads(
    extents: Mapping[str, Sequence[Extent]],
    spans: Sequence[RankSpans],
    own_targets: Iterable[Target],
) -> Iterator[Read]:
    """Yield each rank's reads for its `spans`, array by array; `own_targets`: this rank's targets.

    The extents of an array are in the order of its elements, and cover it.
    """
    reads = {
        name: [Read(extent) for extent in array_extents] for name, array_extents in extents.items()
    }
    for rank, rank_spans in enumerate(spans):
        for name, start, stop in rank_spans:
            for number in _overlapping_extents(extents[name], start, stop):
                reads[name][number].ranks.add(rank)
    for target in own_targets:
        _, name, start, stop = target.span
        for number in _overlapping_extents(extents[name], start, stop):
            reads[name][number].targets.append(target)
    return (read for name in reads for read in reads[name] if read.ranks)


def start_of(extent: Extent) -> int:
    """Return the first element of an extent, by which extents are sorted."""
    return extent.start


def _overlapping_extents(extents: Sequence[Extent], start: int, stop: int) -> range:
    """Return the numbers of the extents that have any of elements `start` .. `stop`."""
    return range(
        bisect_right(extents, start, key=start_of) - 1, bisect_left(extents, stop, key=start_of)
    )
