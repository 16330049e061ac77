"""Copy buffers: short arrays, and arrays outside of node memory, are copied through node memory.

Short ones are copied as a whole, and every rank adds all of them: one exchange (`|`) is enough, in
which no rank waits for another's sum. Two short buffers alternate.

    rank 0    [ copy x0 ] | [ copy 0 + copy 1 ]
    rank 1    [ copy x1 ] | [ copy 0 + copy 1 ]

Long ones travel in segments that fit a buffer of P rows, one for each part as in direct.py. Rank r
sums part r of all ranks and leaves the sum in row r of its own buffer; the others copy it:

    rank 0    [ copy 1, 2, 3 ] | [ sum 0 of all ] | [ take 1, 2, 3 ]    next segment
    rank 1    [ copy 0, 2, 3 ] | [ sum 1 of all ] | [ take 0, 2, 3 ]

One buffer is enough: with the next segment, row r of rank r's buffer is first written after the
exchange by which all have copied it. A part is summed by one rank. The short ones are summed by
all in the order of ranks and out of buffers alone, since NumPy does not always add in place as it
adds into another array: all ranks end with the same bytes.

Cost: short, one exchange, nP read and n (P-1) added per rank; long, two exchanges per segment,
2n copied and n (P-1)/P added per rank. No bytes are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hpctrain.collectives.chunks import bounds, segments, slices
from hpctrain.collectives.node_buffers import SHORT_BYTES, NodeBuffers
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.signature import Signature, must_match_in_node, of_length
from hpctrain.transport.shared_memory.host import ALIGN_BYTES


def parts(x: np.ndarray, ranks: int) -> list[int]:
    """Return `ranks + 1` offsets that cut flat `x` evenly, at cache lines from its start."""
    return bounds(x.size, ranks, ALIGN_BYTES // x.itemsize)


def add(arrays: Sequence[np.ndarray], op: Operation, out: np.ndarray) -> None:
    """Sum `arrays` in their order into `out`, which may be one of the first two."""
    op(arrays[0], arrays[1], out=out)
    for other in arrays[2:]:
        op(out, other, out=out)


def bind_short(
    buffers: NodeBuffers, x: np.ndarray, op: Operation, call: Signature
) -> Callable[[], np.ndarray]:
    """Return a call that reduces flat `x`, no longer than SHORT_BYTES, in place, and returns it.

    It raises UsageError on all ranks of the node unless all make the same `call`.
    """
    flags, rank, payload = buffers.flags, buffers.link.rank, call.payload
    operands = [_operands(buffers.short(x.nbytes, x.dtype, parity), rank) for parity in (0, 1)]

    def reduce() -> np.ndarray:
        own_buffer, first, second, rest = operands[flags.round_number & 1]
        own_buffer[...] = x
        if not flags.agree(payload):
            must_match_in_node(buffers, call)
        op(first, second, out=x)
        for other in rest:
            op(x, other, out=x)
        return x

    return reduce


def reduce_long(buffers: NodeBuffers, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place; the same length on all ranks is already agreed."""
    if x.nbytes <= SHORT_BYTES:
        bind_short(buffers, x, op, of_length(x.nbytes))()
        return
    row_copies = buffers.long(x.dtype)
    for segment in segments(x, row_copies[0].nbytes):
        _segment(buffers, row_copies, segment, op)


def _operands(
    row_copies: list[np.ndarray], rank: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return this rank's buffer, then the first, second and remaining operands."""
    return row_copies[rank], row_copies[0], row_copies[1], row_copies[2:]


def _segment(
    buffers: NodeBuffers, row_copies: list[np.ndarray], x: np.ndarray, op: Operation
) -> None:
    rank, chunks = buffers.link.rank, slices(x, parts(x, len(row_copies)))
    peers, total = [i for i in range(len(row_copies)) if i != rank], chunks[rank]
    for i in peers:
        row_copies[rank][i, : chunks[i].size] = chunks[i]
    buffers.flags.agree()
    # Added in private memory, then copied: a copy overwrites whole cache lines without fetching
    # them from the neighbour that read them last, an addition does not.
    for i in peers:
        op(total, row_copies[i][rank, : total.size], out=total)
    row_copies[rank][rank, : total.size] = total
    buffers.flags.agree()
    for i in peers:
        chunks[i][:] = row_copies[i][i, : chunks[i].size]
