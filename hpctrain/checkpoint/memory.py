"""Copies of a run's state in the memory of ranks, from which the survivors of a lost rank go on.

    write      rank 0          rank 1          rank 2          rank 3        nodes a: 0, 1   b: 2, 3
    own        0               1               2               3
    of others  2               3               0               1             sent to another node

Each rank copies its pieces into a buffer and sends them to its partners. There are two buffers: a
write fills one, while the version committed before stays whole in the other, until all ranks have
agreed that the write is complete and `commit`. Cost: one copy of the pieces, and per partner one
message of the same bytes; memory for 2 (1 + copies) times the pieces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from hpctrain.checkpoint.format import Piece
from hpctrain.checkpoint.memory_reader import HeldState, MemoryReader, newest_whole
from hpctrain.checkpoint.requests import ArrayFacts
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import on_device, pinned, to_host
from hpctrain.transport.link import Link, Request, wait_all

ALIGNMENT = 64  #: each piece begins at a multiple of so many bytes of its buffer


class _PieceFacts(NamedTuple):
    """A piece without its elements."""

    name: str
    offset: int
    size: int
    length: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.length * np.dtype(self.dtype).itemsize


class _Table(NamedTuple):
    """The facts of a rank's write."""

    newest_version: int
    step: int
    about_sha256: str
    pieces: list[_PieceFacts]

    @property
    def nbytes(self) -> int:
        return sum(_padded_bytes(piece.nbytes) for piece in self.pieces)


class MemoryCopies:
    """The copies in a rank's memory; the object outlives the links that it is used with."""

    def __init__(self, copies: int = 1):
        """`copies`: the number of other ranks that hold each rank's pieces, fewer if there are."""
        self._copy_count, self._newest_version = copies, 0
        self._versions: list[HeldState] = []  # the committed version, and its predecessor
        self._written: HeldState | None = None
        self._active_buffer, self._spare_buffer = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._interrupted: list[tuple[np.ndarray, list[Request]]] = []

    @property
    def committed(self) -> HeldState | None:
        """The version that was committed last."""
        return self._versions[0] if self._versions else None

    def write(
        self,
        step: int,
        pieces: Sequence[Piece],
        about: Mapping[str, Any],
        link: Link,
        hosts: Sequence[str],
    ) -> None:
        """Copy this rank's pieces, and hold other ranks' pieces, until `commit`; collective.

        `hosts`: the host of each rank; each copy lies on another host if there are several. The
        committed version stays, also if LostRankError interrupts the write; its predecessor is
        lost. Raises UsageError on all ranks if `step` or `about` differ.
        """
        about_json = json.dumps(about, sort_keys=True)
        tables = _gather_tables(link, self._newest_version, step, about_json, pieces)
        order = [link.rank, *_source_ranks(link, hosts, self._copy_count)]
        self._written, self._versions = None, self._versions[:1]
        buffers = self._cut_spare_buffer([tables[rank].nbytes for rank in order], pieces)
        held_views = [
            _piece_views(tables[r].pieces, x) for r, x in zip(order, buffers, strict=True)
        ]
        for piece, view in zip(pieces, held_views[0], strict=True):
            to_host(piece.array, view.array)
        self._exchange_buffers(link, partners(hosts, self._copy_count)[link.rank], order, buffers)
        self._newest_version = 1 + max(table.newest_version for table in tables)
        self._written = HeldState(
            self._newest_version,
            step,
            json.loads(about_json),
            [piece for views in held_views for piece in views],
            {p.name: ArrayFacts(p.size, p.dtype) for table in tables for p in table.pieces},
        )

    def commit(self) -> None:
        """Commit the version that was written: all ranks have agreed that it is complete."""
        if self._written is None:
            raise UsageError("commit of copies that were not written; expected a write before it")
        self._versions, self._written = [self._written, *self._versions], None
        self._active_buffer, self._spare_buffer = self._spare_buffer, self._active_buffer
        self._interrupted.clear()

    def reader(self, link: Link) -> MemoryReader | None:
        """Return the reader of the newest committed version that is whole; see `newest_whole`."""
        return newest_whole(link, self._versions)

    def _cut_spare_buffer(
        self, lengths: Sequence[int], pieces: Iterable[Piece]
    ) -> list[np.ndarray]:
        """Return slices of the spare buffer, of `lengths` bytes; it grows only if it is too small.

        It is pinned if pieces lie on a device.
        """
        if sum(lengths) > self._spare_buffer.size:
            is_pinned = any(on_device(piece.array) for piece in pieces)  # to be copied to
            n = sum(lengths)
            self._spare_buffer = (
                np.frombuffer(pinned(n), np.uint8, n) if is_pinned else np.zeros(n, np.uint8)
            )
        ends = np.cumsum(lengths)
        return [self._spare_buffer[end - n : end] for end, n in zip(ends, lengths, strict=True)]

    def _exchange_buffers(
        self, link: Link, targets: Iterable[int], order: Sequence[int], buffers: list[np.ndarray]
    ) -> None:
        """Send the own buffer to `targets`, and fill the others from the ranks of `order`."""
        requests: list[Request] = []
        try:
            for source, buffer in zip(order[1:], buffers[1:], strict=True):
                requests.append(link.irecv(buffer, source))
            for target in targets:
                requests.append(link.isend(buffers[0], target))
            wait_all(requests)
        except BaseException:
            # Messages that are still under way may write into this buffer later.
            self._interrupted.append((self._spare_buffer, requests))
            self._spare_buffer = np.empty(0, np.uint8)
            raise


def partners(hosts: Sequence[str], copies: int) -> list[list[int]]:
    """Return for each rank the ranks that hold its copies: on other hosts as long as there are any.

    The copies of the rank with index i on host n are on hosts n + 1, n + 2, ..., at index i.
    """
    ranks_by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_by_host.setdefault(host, []).append(rank)
    host_names = list(ranks_by_host)
    return [
        list(
            islice(
                _candidate_holders(rank, list(ranks_by_host.values()), host_names.index(host)),
                copies,
            )
        )
        for rank, host in enumerate(hosts)
    ]


def _candidate_holders(rank: int, nodes: list[list[int]], own_node: int) -> Iterator[int]:
    """Yield all other ranks: a rank from each other node in turn, at last the own node's ranks."""
    index = nodes[own_node].index(rank)
    rings = [nodes[(own_node + d) % len(nodes)] for d in range(1, len(nodes))]
    for lap in range(max(map(len, nodes))):
        for ring in rings:
            if lap < len(ring):
                yield ring[(index + lap) % len(ring)]
    own_ranks = nodes[own_node]
    yield from (own_ranks[(index + lap) % len(own_ranks)] for lap in range(1, len(own_ranks)))


def _source_ranks(link: Link, hosts: Sequence[str], copies: int) -> list[int]:
    """Return the ranks that send copies to this rank."""
    if len(hosts) != link.size:
        raise UsageError(f"expected the hosts of {link.size} ranks, seen {len(hosts)}")
    return [rank for rank, holders in enumerate(partners(hosts, copies)) if link.rank in holders]


def _gather_tables(
    link: Link, newest_version: int, step: int, about_json: str, pieces: Iterable[Piece]
) -> list[_Table]:
    """Gather each rank's table; raise UsageError unless all ranks write the same state."""
    facts = [_PieceFacts(*p[:3], p.array.size, p.array.dtype.name) for p in pieces]
    own_table = _Table(newest_version, step, hashlib.sha256(about_json.encode()).hexdigest(), facts)
    payloads = all_gather_bytes(link, json.dumps(own_table).encode())
    tables = [
        _Table(version, step, sha256, [_PieceFacts(*row) for row in rows])
        for version, step, sha256, rows in map(json.loads, payloads)
    ]
    for rank, table in enumerate(tables):
        if (table.step, table.about_sha256) != (tables[0].step, tables[0].about_sha256):
            raise UsageError(
                f"rank {rank} writes copies of step {table.step}, rank 0 of step {tables[0].step}; "
                "expected one step and one 'about' on all ranks"
            )
    return tables


def _piece_views(facts: Iterable[_PieceFacts], buffer: np.ndarray) -> list[Piece]:
    """Return the pieces that lie one behind the other in `buffer`."""
    pieces, begin = [], 0
    for piece in facts:
        data = buffer[begin : begin + piece.nbytes].view(piece.dtype)
        pieces.append(Piece(piece.name, piece.offset, piece.size, data))
        begin += _padded_bytes(piece.nbytes)
    return pieces


def _padded_bytes(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
