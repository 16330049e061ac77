"""Reading a state from the memory of ranks: live arrays, or the copies of memory.py.

All ranks know the ranges that each holds. A rank takes a range from its own memory where it can;
else the holder with the fewest bytes to send sends the range. Rank 3 has just joined:

    held by rank     0: param, m[0:4]     1: param, m[4:8], m[0:4]     2: param     3: nothing
    requested by 3      param, m
    sent to 3           param, in three thirds by ranks 0 .. 2; m[0:4] by rank 0, m[4:8] by rank 1

Messages are of SEGMENT_BYTES at most, and lie in host memory: a segment of a device is copied there
first. A target may be the very memory of its source, which is then left alone; any other overlap
of a target with held arrays is an error of the caller.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint.exchange import Exchange, RankSpans, Read, Target, plan_reads
from hpctrain.checkpoint.format import Piece
from hpctrain.checkpoint.requests import ArrayFacts, Reader
from hpctrain.collectives import all_gather_bytes
from hpctrain.collectives.tree import broadcast_bytes
from hpctrain.core.errors import RecoveryError
from hpctrain.core.files import MIB
from hpctrain.core.xp import address_of, on_device, to_host
from hpctrain.transport.link import Link

SEGMENT_BYTES = 4 * MIB  #: the bytes of a message at most


@dataclass(frozen=True)
class HeldState:
    """A state of the run; this rank holds pieces of the state."""

    version: int  #: of the write of copies; of two states the greater is the newer
    step: int
    about: Mapping[str, Any]  #: JSON data of the run, the same on all ranks
    pieces: Sequence[Piece]  #: that this rank can send
    facts: Mapping[str, ArrayFacts]  #: of the whole state's arrays, as far as this rank knows them


def live_state(step: int, pieces: Sequence[Piece], about: Mapping[str, Any]) -> HeldState:
    """Return the state of a training that goes on, where a rank holds each array: without a copy.

    The version is 0: live states are ordered by their steps.
    """
    facts = {p.name: ArrayFacts(p.size, p.array.dtype.name) for p in pieces}
    return HeldState(0, step, about, pieces, facts)


class Holding(NamedTuple):
    """Elements `start` .. `stop` of an array, in the memory of a rank."""

    rank: int
    start: int
    stop: int


class Segment(NamedTuple):
    """Consecutive elements of an array, and all ranks that hold them."""

    array: str
    dtype: str
    start: int
    stop: int
    holders: set[int]

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * np.dtype(self.dtype).itemsize


class MemoryReader(Reader):
    """The arrays of a state in the memory of the ranks of a link."""

    def __init__(
        self,
        step: int,
        about: dict[str, Any],
        facts: Mapping[str, ArrayFacts],
        holdings: Mapping[str, Sequence[Holding]],
        pieces: Sequence[Piece],
    ):
        """`holdings`: what each rank of the link holds, by array; `pieces`: this rank's pieces."""
        super().__init__(f"step {step} in the memory of the ranks", step, about, facts)
        self._holdings, self._pieces = holdings, pieces

    def _make_exchange(self, link: Link) -> Exchange:
        def load(segment: Any) -> np.ndarray:
            return np.ascontiguousarray(to_host(self._segment_values(segment))).view(np.uint8)

        return Exchange(link, load)

    def _fetch_turn(
        self, exchange: Exchange, spans: list[RankSpans], own_targets: list[Target]
    ) -> None:
        reads = list(plan_reads(self._cut_segments(spans), spans, own_targets))
        reads_by_rank = _deal_reads(reads, exchange.link.size)
        for read in reads:
            if exchange.link.rank in read.extent.holders:
                exchange.run_guarded(self._copy_own_extent, read)
        exchange.run(reads_by_rank)

    def _copy_own_extent(self, read: Read) -> None:
        """Write an extent of this rank's own memory into its targets."""
        values = self._segment_values(read.extent)
        for target in read.targets:
            if not _is_in_place(target, read.extent.start, values):
                target.write(read.extent.start, values)
        read.targets.clear()

    def _segment_values(self, segment: Segment) -> Any:
        """Return the elements of a segment that this rank holds."""
        for name, offset, _, array in self._pieces:
            if name == segment.array and offset <= segment.start <= segment.stop <= (
                offset + array.size
            ):
                return array[segment.start - offset : segment.stop - offset]
        raise AssertionError(f"this rank does not hold {segment}")

    def _cut_segments(self, spans: Iterable[RankSpans]) -> dict[str, list[Segment]]:
        """Return the segments of each requested array.

        They are cut where a request or a holding begins or ends: a rank receives nothing else, and
        each segment has one set of holders.
        """
        edges: dict[str, set[int]] = {}
        for rank_spans in spans:
            for name, start, stop in rank_spans:
                edges.setdefault(name, set()).update((start, stop))
        return {
            name: self._array_segments(name, array_edges) for name, array_edges in edges.items()
        }

    def _array_segments(self, name: str, edges: set[int]) -> list[Segment]:
        (size, dtype), holdings = self._facts[name], self._holdings.get(name, ())
        segment_length = max(1, SEGMENT_BYTES // np.dtype(dtype).itemsize)
        ends = (end for _, start, stop in holdings for end in (start, stop))
        bounds = sorted({*edges, *ends, *range(0, size, segment_length), size})
        segments = [Segment(name, dtype, start, stop, set()) for start, stop in pairwise(bounds)]
        for rank, start, stop in holdings:
            for segment in segments[bisect_left(bounds, start) : bisect_left(bounds, stop)]:
                segment.holders.add(rank)
        return segments


def newest_whole(link: Link, states: Sequence[HeldState]) -> MemoryReader | None:
    """Return the reader of the newest state that the ranks hold completely; collective.

    Each rank gives the states that it holds pieces of; a rank that has just joined gives none. The
    memory of the pieces must stay as it is until all ranks have fetched. Returns None on all ranks
    if no state is whole.
    """
    own_table = [
        (s.version, s.step, s.facts, [(p.name, p.offset, p.array.size) for p in s.pieces])
        for s in states
    ]
    tables = [json.loads(t) for t in all_gather_bytes(link, json.dumps(own_table).encode())]
    rows = [(rank, *row) for rank, table in enumerate(tables) for row in table]
    for key in sorted({(version, step) for _, version, step, _, _ in rows}, reverse=True):
        rows_of_state = [row for row in rows if (row[1], row[2]) == key]
        facts = {n: ArrayFacts(*f) for row in rows_of_state for n, f in row[3].items()}
        holdings = _list_holdings(rows_of_state)
        if all(_covers_array(holdings.get(name, []), array.size) for name, array in facts.items()):
            own_state = next((s for s in states if (s.version, s.step) == key), None)
            root = rows_of_state[0][0]  # ranks that have just joined have no `about`
            payload = (
                json.dumps(own_state.about).encode() if own_state and link.rank == root else b""
            )
            about = json.loads(broadcast_bytes(link, payload, root))
            return MemoryReader(
                key[1], about, facts, holdings, own_state.pieces if own_state else ()
            )
    return None


def _list_holdings(rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Holding]]:
    """Return the ranks' holdings by array."""
    holdings: dict[str, list[Holding]] = {}
    for rank, _, _, _, pieces in rows:
        for name, offset, length in pieces:
            holdings.setdefault(name, []).append(Holding(rank, offset, offset + length))
    return holdings


def _covers_array(holdings: Iterable[Holding], size: int) -> bool:
    end = 0
    for start, stop in sorted((holding.start, holding.stop) for holding in holdings):
        if start > end:
            return False
        end = max(end, stop)
    return end >= size


def _deal_reads(reads: Iterable[Read], size: int) -> list[list[Read]]:
    """Return the reads that each rank sends, and remove the ranks that hold the extent themselves.

    Extents with a single holder are dealt first, so that the others even out the load. Raises
    RecoveryError, on all ranks alike, for an extent without a holder.
    """
    reads_by_rank: list[list[Read]] = [[] for _ in range(size)]
    bytes_by_rank = [0] * size
    for read in sorted(reads, key=lambda read: len(read.extent.holders)):
        segment: Segment = read.extent
        if not segment.holders:
            raise RecoveryError(
                f"no rank holds elements {segment.start} to {segment.stop - 1} of "
                f"'{segment.array}', which rank {min(read.ranks)} requests; go back to an older "
                "copy or to a checkpoint"
            )
        read.ranks -= segment.holders
        if read.ranks:
            rank = min(segment.holders, key=lambda r: (bytes_by_rank[r], r))
            bytes_by_rank[rank] += segment.nbytes * len(read.ranks)
            reads_by_rank[rank].append(read)
    return reads_by_rank


def _is_in_place(target: Target, start: int, values: Any) -> bool:
    """Return whether `values`, from element `start` on, lie where the target wants them."""
    out = target.out
    if target.turn or (out.dtype, out.strides) != (values.dtype, values.strides):
        return False
    first_element = max(start, target.start)
    x, y = out[first_element - target.start :], values[first_element - start :]
    return on_device(x) == on_device(y) and address_of(x) == address_of(y)
