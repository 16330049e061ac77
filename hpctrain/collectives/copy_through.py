"""Reduction through copies in node memory, for short arrays and arrays outside of node memory.

Every rank copies its short array as a whole into its buffer, and every rank adds all copies. One
exchange of flags (`|`) is enough: no rank waits for another's sum. Two short buffers alternate.

    rank 0    [ copy x0 ] | [ copy 0 + copy 1 ]
    rank 1    [ copy x1 ] | [ copy 0 + copy 1 ]

A long array travels in segments that fit a buffer of P rows, one for each part as in direct.py.
Rank r sums part r of all ranks and leaves the sum in row r of its own buffer; the others copy it:

    rank 0    [ copy 1, 2, 3 ] | [ sum 0 of all ] | [ take 1, 2, 3 ]    next segment
    rank 1    [ copy 0, 2, 3 ] | [ sum 1 of all ] | [ take 0, 2, 3 ]

One long buffer is enough: for the next segment, row r of rank r's buffer is first written after an
exchange of flags, and all ranks have copied that row before the exchange.

All ranks end with the same bytes: one rank sums each part of a long array, and all ranks add short
arrays in the order of ranks. Operands of short sums are buffers alone, since NumPy's addition in
place may differ in bits from its addition into another array.

Cost: short, one exchange, nP read and n (P-1) added per rank; long, two exchanges per segment,
2n copied and n (P-1)/P added per rank. No bytes are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpctrain.collectives.chunks import bounds, segments, slices
from hpctrain.collectives.node_buffers import SHORT_BUFFER_BYTES, NodeBuffers
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.signature import Signature, length_signature, must_match_in_node
from hpctrain.transport.shared_memory.flags import ROUND_BITS
from hpctrain.transport.shared_memory.host import ALIGN_BYTES


def part_offsets(x: np.ndarray, ranks: int) -> list[int]:
    """Return `ranks + 1` offsets that cut flat `x` evenly, at multiples of a cache line."""
    return bounds(x.size, ranks, ALIGN_BYTES // x.itemsize)


def sum_in_order(arrays: Sequence[np.ndarray], op: Operation, out: np.ndarray) -> None:
    """Sum `arrays` in their order into `out`; it may be the first or the second array."""
    op(arrays[0], arrays[1], out=out)
    for operand in arrays[2:]:
        op(out, operand, out=out)


def bind_short_reduction(
    buffers: NodeBuffers, x: np.ndarray, op: Operation, call: Signature
) -> Callable[[], np.ndarray]:
    """Return a call that reduces short flat `x` in place and returns it.

    That call raises UsageError on all ranks of the node unless all make the same `call`.
    """
    flags, agree, payload = buffers.flags, buffers.flags.agree, call.payload
    # At few bytes every 10 ns count: a copy of bytes takes half as long as one of NumPy's arrays.
    x_bytes = x.view(np.uint8).data
    buffers_by_parity: list[tuple[Any, ...]] = [
        (copies[buffers.link.rank].view(np.uint8).data, *copies[:2], copies[2:])
        for copies in buffers.short_buffers(x.nbytes, x.dtype)
    ]

    def reduce() -> np.ndarray:
        own_bytes, first, second, others = buffers_by_parity[flags.next_head >> ROUND_BITS & 1]
        own_bytes[:] = x_bytes
        if not agree(payload):
            must_match_in_node(buffers, call)
        op(first, second, out=x)
        for other in others:
            op(x, other, out=x)
        return x

    return reduce


def reduce_long(buffers: NodeBuffers, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place; ranks have already agreed that their lengths are equal."""
    if x.nbytes <= SHORT_BUFFER_BYTES:
        bind_short_reduction(buffers, x, op, length_signature(x.nbytes))()
        return
    long_buffers = buffers.long_buffers(x.dtype)
    for segment in segments(x, long_buffers[0].nbytes):
        _reduce_segment(buffers, long_buffers, segment, op)


def _reduce_segment(
    buffers: NodeBuffers, long_buffers: list[np.ndarray], x: np.ndarray, op: Operation
) -> None:
    rank, chunks = buffers.link.rank, slices(x, part_offsets(x, len(long_buffers)))
    peers, total = [i for i in range(len(long_buffers)) if i != rank], chunks[rank]
    for i in peers:
        long_buffers[rank][i, : chunks[i].size] = chunks[i]
    buffers.flags.agree()
    # The sum is made in private memory, then copied. A copy overwrites whole cache lines; an
    # addition in place would first fetch them from the neighbour that read them last.
    for i in peers:
        op(total, long_buffers[i][rank, : total.size], out=total)
    long_buffers[rank][rank, : total.size] = total
    buffers.flags.agree()
    for i in peers:
        chunks[i][:] = long_buffers[i][i, : chunks[i].size]
