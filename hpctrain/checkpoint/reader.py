"""Reading a checkpoint: ranks request ranges of arrays; the job reads each byte from disk once.

First each rank notes its requests, then all fetch. An extent that several ranks request is read and
verified by the one of them that has read the fewest bytes, which sends it to the others. Four
ranks, parameters that all request, and an optimizer state in shards:

    extents of the files      p0  p1  p2  p3  p4  p5  p6  p7     s0  s1  s2  s3
    read by rank               0   1   2   3   0   1   2   3      0   1   2   3
    round 0                   p0..p3: each reads one, writes it into its array, sends it on
    round 1                   p4..p7
    round 2                   s0..s3: nobody else requests them

Memory beside the arrays: two extents, one read and one received. Within a round rank r sends to
r + 1, r + 2, ... while it receives from r - 1, r - 2, ...: each link carries one extent at a time.

A fault does not stop the exchange, in which other ranks wait: it is raised afterwards. What was
written until then is overwritten when an older checkpoint is fetched in its place. The
calls of `on_arrival`, which change what may change only then, are not made.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint.format import Manifest
from hpctrain.checkpoint.parts import Extent, check_header, extents_in_part, read_extent
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import copy, like
from hpctrain.transport.link import Link, Request


class Reader:
    """The arrays of a checkpoint, which can be requested by name and range."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.step = path, manifest.step
        self.about, self.state = manifest.about, manifest.state
        self.sizes = {name: flat.size for name, flat in manifest.arrays.items()}
        self.arrays: dict[str, np.ndarray] = {}  #: those requested whole, see `request_whole`
        self._manifest = manifest
        self._targets: list[_Target] = []
        self._arrival_calls: list[Callable[[], None]] = []

    def request(self, name: str, out: Any, offset: int = 0, turn: int = 0) -> None:
        """Request the elements of `name` from `offset` on, as many as flat `out` has.

        `fetch` writes them into `out`, an array of the host or of a device, in the dtype of `out`.
        Requests of turn 1, 2, ... are added to what the turns before have written.
        """
        if not 0 <= offset <= offset + out.size <= self.sizes[name]:
            raise UsageError(
                f"{self.path}: '{name}' has {self.sizes[name]} elements; expected {out.size} from "
                f"{offset} on"
            )
        if out.size:
            self._targets.append(_Target(turn, name, offset, out))

    def request_whole(self, names: Iterable[str]) -> None:
        """Request whole arrays, in `arrays` after `fetch`."""
        for name in names:
            flat = self._manifest.arrays[name]
            self.arrays[name] = np.empty(flat.size, flat.dtype)
            self.request(name, self.arrays[name])

    def on_arrival(self, call: Callable[[], None]) -> None:
        """Register a `call` to make once everything that any rank requested has arrived."""
        self._arrival_calls.append(call)

    def fetch(self, link: Link) -> None:
        """Read what all ranks have requested; raise the first fault of this rank; collective."""
        exchange = _Exchange(self, link)
        for number in range(link.rank, len(self._manifest.parts), link.size):
            exchange.run_guarded(check_header, self.path, self._manifest.parts[number])
        own_spans = json.dumps(_merge_requests(self._targets)).encode()
        spans = [json.loads(rank_spans) for rank_spans in all_gather_bytes(link, own_spans)]
        extents = self._extents()
        for turn in range(
            1 + max((span[0] for rank_spans in spans for span in rank_spans), default=0)
        ):
            own = [target for target in self._targets if target.turn == turn]
            spans_of_turn = [
                [span[1:] for span in rank_spans if span[0] == turn] for rank_spans in spans
            ]
            exchange.run(_deal_reads(_plan_reads(extents, spans_of_turn, own), link.size))
        if exchange.fault is not None:
            raise exchange.fault

    def finish(self) -> None:
        """Make the calls of `on_arrival`: all ranks have fetched without a fault."""
        for call in self._arrival_calls:
            call()

    def _extents(self) -> dict[str, list[Extent]]:
        """Return the extents of each array, in the order of its elements."""
        extents: dict[str, list[Extent]] = {name: [] for name in self.sizes}
        slot_edges = self._manifest.edges
        for part in self._manifest.parts:
            for extent in extents_in_part(part, self._manifest.arrays, slot_edges):
                extents[extent.array].append(extent)
        return {name: sorted(array_extents, key=_start) for name, array_extents in extents.items()}


class _Target(NamedTuple):
    """A request: elements from `start` on of an array, to be written into `out`."""

    turn: int
    array: str
    start: int
    out: Any

    @property
    def span(self) -> tuple[int, str, int, int]:
        """The turn, the array, its first element, and the one after the last."""
        return self.turn, self.array, self.start, self.start + self.out.size

    def write(self, start: int, values: np.ndarray) -> None:
        """Write or add the `values` of the array from element `start` on, as far as requested."""
        begin = max(start, self.start)
        end = min(start + values.size, self.start + self.out.size)
        x = self.out[begin - self.start : end - self.start]
        new_values = values[begin - start : end - start]
        if self.turn:
            x += like(x, new_values)
        else:
            copy(x, new_values)


@dataclass
class _Read:
    """An extent, the ranks that request elements of it, and the requests of this rank."""

    extent: Extent
    ranks: set[int] = field(default_factory=set)
    targets: list[_Target] = field(default_factory=list)


class _Exchange:
    """The reads and messages of one rank."""

    def __init__(self, reader: Reader, link: Link):
        self.fault: Exception | None = None
        self._path, self._link = reader.path, link
        self._own_extent, self._received = np.empty(0, np.uint8), np.empty(0, np.uint8)

    def run_guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return `act(*arguments)`; keep the first error instead of raising it."""
        try:
            return call(*arguments)
        except Exception as error:  # other ranks wait for this one in the exchange
            self.fault = self.fault or error
            return None

    def run(self, reads_by_rank: list[list[_Read]]) -> None:
        """Read and exchange the extents of all ranks: `dealt[r]` are those that rank r reads."""
        rank, size = self._link.rank, self._link.size
        max_bytes = max(
            (read.extent.nbytes for reads in reads_by_rank for read in reads), default=0
        )
        if max_bytes > self._own_extent.size:
            self._own_extent = np.empty(max_bytes, np.uint8)
            self._received = np.empty(max_bytes if size > 1 else 0, np.uint8)
        for round_reads in zip_longest(*reads_by_rank):
            own = round_reads[rank]
            if own is not None:
                self._read(own)
            for distance in range(1, size):
                self._exchange_extents(
                    own, (rank + distance) % size, round_reads, (rank - distance) % size
                )

    def _read(self, read: _Read) -> None:
        if self.run_guarded(read_extent, self._path, read.extent, self._own_extent) is None:
            self._own_extent[: read.extent.nbytes] = (
                0  # the other ranks receive zeros, which are never used
            )
        self._write(read, self._own_extent)

    def _exchange_extents(
        self, own: _Read | None, to: int, round_reads: tuple[_Read | None, ...], source: int
    ) -> None:
        """Send this rank's extent to rank `to`, and receive that of rank `source`, if requested."""
        requests: list[Request] = []
        incoming = round_reads[source]
        if incoming is not None and self._link.rank not in incoming.ranks:
            incoming = None
        if incoming is not None:
            requests.append(self._link.irecv(self._received[: incoming.extent.nbytes], source))
        if own is not None and to in own.ranks:
            requests.append(self._link.isend(self._own_extent[: own.extent.nbytes], to))
        for request in requests:
            request.wait()
        if incoming is not None:
            self._write(incoming, self._received)

    def _write(self, read: _Read, data: np.ndarray) -> None:
        values = data[: read.extent.nbytes].view(read.extent.dtype)
        for target in read.targets:
            self.run_guarded(target.write, read.extent.start, values)


def _plan_reads(
    extents: Mapping[str, list[Extent]], spans: list[list[list[Any]]], own: Iterable[_Target]
) -> Iterator[_Read]:
    """Yield the reads of all ranks for their `spans`, array by array; `own`: of this rank."""
    reads = {
        name: [_Read(extent) for extent in array_extents] for name, array_extents in extents.items()
    }
    for rank, rank_spans in enumerate(spans):
        for name, start, stop in rank_spans:
            for number in _overlapping_extents(extents[name], start, stop):
                reads[name][number].ranks.add(rank)
    for target in own:
        _, name, start, stop = target.span
        for number in _overlapping_extents(extents[name], start, stop):
            reads[name][number].targets.append(target)
    return (read for name in reads for read in reads[name] if read.ranks)


def _overlapping_extents(extents: Sequence[Extent], start: int, stop: int) -> range:
    """Return the numbers of the extents that have any of elements `start` .. `stop`."""
    return range(
        bisect_right(extents, start, key=_start) - 1, bisect_left(extents, stop, key=_start)
    )


def _start(extent: Extent) -> int:
    return extent.start


def _merge_requests(targets: Iterable[_Target]) -> list[list[Any]]:
    """Return the requests as [turn, array, start, stop], with neighbours joined."""
    spans: list[list[Any]] = []
    for turn, array, start, stop in sorted(target.span for target in targets):
        if spans and spans[-1][:2] == [turn, array] and start <= spans[-1][3]:
            spans[-1][3] = max(spans[-1][3], stop)
        else:
            spans.append([turn, array, start, stop])
    return spans


def _deal_reads(reads: Iterable[_Read], size: int) -> list[list[_Read]]:
    """Deal the reads to ranks: every extent is read by a rank that requests it."""
    reads_by_rank: list[list[_Read]] = [[] for _ in range(size)]
    bytes_by_rank: dict[int, int] = defaultdict(int)
    for read in reads:
        rank = min(read.ranks, key=lambda r: (bytes_by_rank[r], r))
        bytes_by_rank[rank] += read.extent.nbytes
        reads_by_rank[rank].append(read)
    return reads_by_rank
