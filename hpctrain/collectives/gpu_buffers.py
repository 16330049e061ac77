"""Collectives on GPU arrays that no neighbour maps: through buffers of the node that CUDA IPC maps.

    x          [ piece 0 ][ piece 1 ][ pie ]                  each rank's, in any memory of its GPU
                    | copy
    buffers    [ rank 0 ] [ rank 1 ] [ rank 2 ]               read, and by sums written, by all
                    | copy, of a sum or of neighbours' parts
    x          [ piece 0 ] ...

Each piece waits twice for the stream, and for the flags of the node. When a call returns, its
copies are done: the next one may be in another stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpctrain.collectives.chunks import slices, views_of_part
from hpctrain.collectives.copy_through import part_offsets
from hpctrain.collectives.group import Group
from hpctrain.collectives.node_buffers import NodeBuffers
from hpctrain.collectives.reductions.operations import Operation, combine
from hpctrain.core.errors import TransportError
from hpctrain.core.kernels import PACK_BYTES
from hpctrain.core.xp import Array, copy, finish, on_device

PIECE = 0x67707562  #: what ranks exchange between the copies of a piece


def mapped_buffers(group: Group, x: Array) -> tuple[NodeBuffers, list[Array]] | None:
    """Return the node, and every rank's GPU buffer in the dtype of `x`; None where there is none.

    Also for arrays of the host. The first use is collective over the node.
    """
    node, memory = group.node_buffers, None if group.memory is None else group.memory.gpu
    if node is None or memory is None or not memory.shares or not on_device(x):
        return None
    buffers = node.gpu_buffers(x.dtype)
    return None if buffers is None else (node, buffers)


def reduce(node: NodeBuffers, buffers: Sequence[Array], x: Array, op: Operation) -> None:
    """Reduce flat `x` in place over the ranks of the node."""
    for piece in _pieces(x, buffers[0].size):
        arrays = [buffer[: piece.size] for buffer in buffers]
        copy(arrays[node.link.rank], piece)
        _wait_for_all(node, x)
        combine_parts(node, arrays, op)
        copy(piece, arrays[node.link.rank])
    finish(x)


def reduce_scatter(
    node: NodeBuffers, buffers: Sequence[Array], x: Array, op: Operation, offsets: Sequence[int]
) -> Array:
    """Reduce part r of flat `x`, `offsets[r]:offsets[r + 1]`, on local rank r, in place; return it.

    The other parts are unchanged.
    """
    rank, ranks = node.link.rank, len(buffers)
    length = buffers[0].size // ranks // PACK_BYTES * PACK_BYTES
    rows = [buffer[: ranks * length].reshape(ranks, length) for buffer in buffers]
    for pieces in _pieces_of_parts(x, offsets, length):
        for row, piece in zip(rows[rank], pieces, strict=True):
            copy(row[: piece.size], piece)
        _wait_for_all(node, x)
        own = pieces[rank]
        combine([row[rank][: own.size] for row in rows], op, [own])
        _wait_for_all(node, x)
    return x[offsets[rank] : offsets[rank + 1]]


def all_gather(
    node: NodeBuffers, buffers: Sequence[Array], x: Array, offsets: Sequence[int]
) -> None:
    """Fill flat `x` with the parts of the node's ranks; this rank's own is in place."""
    rank = node.link.rank
    for pieces in _pieces_of_parts(x, offsets, buffers[0].size):
        copy(buffers[rank][: pieces[rank].size], pieces[rank])
        _wait_for_all(node, x)
        for other, (piece, buffer) in enumerate(zip(pieces, buffers, strict=True)):
            if other != rank:
                copy(piece, buffer[: piece.size])
        _wait_for_all(node, x)


def combine_parts(
    node: NodeBuffers, arrays: Sequence[Array], op: Operation, shared: bool = False
) -> None:
    """Reduce this rank's part of the node's `arrays`, into each or the first; wait for the node."""
    offsets = part_offsets(arrays[0], len(arrays))
    views = views_of_part(arrays, offsets, node.link.rank)
    combine(views, op, views[:1] if shared else views)
    _wait_for_all(node, arrays[node.link.rank])


def _wait_for_all(node: NodeBuffers, x: Array) -> None:
    """Return when every rank's stream has done its work so far on arrays as `x`.

    Raises TransportError if another rank is in another call: an error may have ended this one.
    """
    finish(x)
    if not node.flags.agree(PIECE):
        raise TransportError(
            "a rank of the node has left a collective on GPU arrays: see its error"
        )


def _pieces(x: Array, length: int) -> Iterator[Array]:
    return (x[start : start + length] for start in range(0, x.size, length))


def _pieces_of_parts(x: Array, offsets: Sequence[int], length: int) -> Iterator[list[Array]]:
    """Yield the next at most `length` elements of each part, until the longest part is over."""
    parts = slices(x, list(offsets))
    for start in range(0, max(part.size for part in parts), length):
        yield [part[start : start + length] for part in parts]
