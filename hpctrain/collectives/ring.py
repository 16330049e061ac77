"""Ring algorithms: every rank sends 1/P of the vector to its right neighbour, again and again.

The vector is cut into P chunks. Four ranks, chunks a b c d; `2b` means "the sum of two ranks":

    rank   start     reduce-scatter                          all-gather
     0    a b c d    a  b 2c  d    a 3b 2c  d   4a 3b 2c  d   4a 3b 2c 4d  ...  4a 4b 4c 4d
     1    a b c d    a  b  c 2d    a  b 3c 2d    a 4b 3c 2d   4a 4b 3c 2d  ...  4a 4b 4c 4d
     2    a b c d   2a  b  c  d   2a  b  c 3d   2a  b 4c 3d   2a 4b 4c 3d  ...  4a 4b 4c 4d
     3    a b c d    a 2b  c  d   3a 2b  c  d   3a 2b  c 4d   3a 2b 4c 4d  ...  4a 4b 4c 4d

Index rule: at step s of the reduce-scatter, rank r sends chunk r - 1 - s and adds the chunk from
the left to chunk r - 2 - s; so it ends owning the sum of chunk r. At step s of the all-gather it
sends chunk r - s and receives chunk r - 1 - s directly into `x`.

A chunk travels in segments: while segment k is added, k + 1 and those behind it are on the wire,
and segment k is still in the cache.

    wire   [ seg 0 ][ seg 1 ][ seg 2 ][ seg 3 ]
    add             [ seg 0 ][ seg 1 ][ seg 2 ][ seg 3 ]

Between nodes a segment is forwarded to the right as soon as it is added, or received, without
waiting for the rest of its chunk; so all steps of both halves are one stream, and the wire is never
idle:

    to the right    [ own 0 ][ own 1 ][ own 2 ][ sum 0 ][ sum 1 ][ sum 2 ][ ...
    from the left   [ seg 0 ][ seg 1 ][ seg 2 ][ ...

Within a node messages cost the time of the cores, and no wire idles: there, fewer and longer steps
are faster.

Cost of the all-reduce: 2(P-1) steps, 2n(P-1)/P bytes sent per rank (the least possible), n(P-1)/P
elements added. Scratch: 2 MiB, the segments whose receive is posted before they are needed; for
`plain_ring`, which does not cut chunks, one chunk of n/P. Each chunk is summed once round the ring
and then only copied: all ranks end with the same bytes.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from hpctrain.collectives.chunks import SEGMENT_BYTES, bounds, chunks, segments, slices
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.transport.link import Link, Request, wait_all

RECEIVES_AHEAD = 2  # segments whose receive is posted before they are needed


def ring(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`."""
    rank, size = group.link.rank, group.link.size
    chunk_views = chunks(x, size)
    if is_streamed(group, chunk_views):
        _stream_chunks(group, chunk_views, rank - 1, (size - 1, size - 1), op)
        return
    reduce_scatter(group, x, op)
    all_gather(group, x)


def plain_ring(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place with uncut chunks: the baseline of segments."""
    whole_chunk_group = Group(group.link, group.scratch)
    reduce_scatter(whole_chunk_group, x, op, segment_bytes=max(x.nbytes, 1))
    all_gather(whole_chunk_group, x)


def reduce_scatter(
    group: Group,
    x: np.ndarray,
    op: Operation,
    segment_bytes: int = SEGMENT_BYTES,
    offsets: Sequence[int] | None = None,
) -> np.ndarray:
    """Return this rank's chunk of flat `x` as a view, reduced; the rest of `x` is overwritten.

    Rank r's chunk is `offsets[r]:offsets[r + 1]`, which may be empty; by default chunks are even.
    """
    rank, size = group.link.rank, group.link.size
    chunk_views = slices(x, offsets or bounds(x.size, size))
    if is_streamed(group, chunk_views):
        _stream_chunks(group, chunk_views, rank - 1, (size - 1, 0), op)
        return chunk_views[rank]
    # The longest of all chunks decides, so that sender and receiver agree: an empty chunk is one
    # message if uncut, and none if cut into segments.
    is_uncut = max(c.nbytes for c in chunk_views) <= segment_bytes
    for step in range(size - 1):
        outgoing, target = (
            chunk_views[(rank - 1 - step) % size],
            chunk_views[(rank - 2 - step) % size],
        )
        if is_uncut:
            _exchange_and_add(group, outgoing, target, op)
        else:
            _exchange_and_add_segments(group, outgoing, target, op, segment_bytes)
    return chunk_views[rank]


def all_gather(group: Group, x: np.ndarray, offsets: Sequence[int] | None = None) -> None:
    """Fill flat `x` with every rank's chunk; this rank's own chunk is in place before the call.

    Chunks are cut as in `reduce_scatter`.
    """
    link = group.link
    rank, size = link.rank, link.size
    left, right = _neighbours(link)
    chunk_views = slices(x, offsets or bounds(x.size, size))
    if is_streamed(group, chunk_views):
        _stream_chunks(group, chunk_views, rank, (0, size - 1), np.add)
        return
    for step in range(size - 1):
        link.sendrecv(
            chunk_views[(rank - step) % size], right, chunk_views[(rank - 1 - step) % size], left
        )


def is_streamed(group: Group, chunk_views: Sequence[np.ndarray]) -> bool:
    """Return whether chunks travel as one stream: they cross nodes, and exceed one segment."""
    return len(group.nodes) > 1 and max(c.nbytes for c in chunk_views) > group.stream_segment_bytes


def _stream_chunks(
    group: Group,
    chunk_views: Sequence[np.ndarray],
    first: int,
    steps: tuple[int, int],
    op: Operation,
) -> None:
    """Send chunks `first`, `first - 1`, ... to the right; all but the first come from the left.

    `steps`: how many steps add, and how many receive directly into `x`.
    """
    link = group.link
    left, right = _neighbours(link)
    segment_bytes = group.stream_segment_bytes
    chunk_segments = [list(segments(c, segment_bytes)) or [c] for c in chunk_views]
    sent_segments = [
        segment for s in range(sum(steps)) for segment in chunk_segments[(first - s) % link.size]
    ]
    received_segments = [
        segment
        for s in range(sum(steps))
        for segment in chunk_segments[(first - 1 - s) % link.size]
    ]
    added_count = sum(len(chunk_segments[(first - 1 - s) % link.size]) for s in range(steps[0]))
    # At most the segments of a chunk: a segment must arrive before it is forwarded, and the partial
    # sum in `x` must have been sent before a segment is received into the same place.
    receives_ahead = min(RECEIVES_AHEAD, *map(len, chunk_segments))
    inboxes = group.scratch.buffer_rows(max(chunk_views, key=len), receives_ahead, segment_bytes)
    sends: deque[Request | None] = deque([None] * receives_ahead)
    posted_receives: deque[_PostedReceive | None] = deque([None] * receives_ahead)
    for k, (outgoing, target) in enumerate(zip_longest(sent_segments, received_segments)):
        _add_received(posted_receives.popleft(), op)
        _wait_for(sends.popleft())
        inbox = inboxes[k % receives_ahead] if k < added_count else None
        posted_receives.append(None if target is None else _post_receive(link, left, target, inbox))
        sends.append(None if outgoing is None else link.isend(outgoing, right))
    for receive in posted_receives:
        _add_received(receive, op)
    for send in sends:
        _wait_for(send)


class _PostedReceive(NamedTuple):
    """A pending receive: into an inbox that will be added to `segment`, or into `segment`."""

    request: Request
    inbox: np.ndarray | None
    segment: np.ndarray


def _post_receive(
    link: Link, source: int, segment: np.ndarray, inbox: np.ndarray | None
) -> _PostedReceive:
    inbox = None if inbox is None else inbox[: segment.size]
    return _PostedReceive(link.irecv(segment if inbox is None else inbox, source), inbox, segment)


def _exchange_and_add(
    group: Group, outgoing: np.ndarray, target: np.ndarray, op: Operation
) -> None:
    """Send chunk `outgoing` to the right and add the chunk from the left to `target`."""
    left, right = _neighbours(group.link)
    inbox = group.scratch.buffer_like(target)
    group.link.sendrecv(outgoing, right, inbox, left)
    op(target, inbox, out=target)


def _exchange_and_add_segments(
    group: Group, outgoing: np.ndarray, target: np.ndarray, op: Operation, segment_bytes: int
) -> None:
    link = group.link
    left, right = _neighbours(link)
    inboxes = group.scratch.buffer_rows(target, RECEIVES_AHEAD, segment_bytes)
    sends: list[Request] = []
    posted_receives: deque[_PostedReceive] = deque()
    pairs = zip_longest(segments(outgoing, segment_bytes), segments(target, segment_bytes))
    for k, (sent_segment, received_segment) in enumerate(pairs):
        if len(posted_receives) == RECEIVES_AHEAD:
            _add_received(posted_receives.popleft(), op)
        if received_segment is not None:
            posted_receives.append(
                _post_receive(link, left, received_segment, inboxes[k % RECEIVES_AHEAD])
            )
        if sent_segment is not None:
            sends.append(link.isend(sent_segment, right))
    for receive in posted_receives:
        _add_received(receive, op)
    wait_all(sends)


def _add_received(receive: _PostedReceive | None, op: Operation) -> None:
    if receive is None:
        return
    receive.request.wait()
    if receive.inbox is not None:
        op(receive.segment, receive.inbox, out=receive.segment)


def _wait_for(request: Request | None) -> None:
    if request is not None:
        request.wait()


def _neighbours(link: Link) -> tuple[int, int]:
    return (link.rank - 1) % link.size, (link.rank + 1) % link.size
