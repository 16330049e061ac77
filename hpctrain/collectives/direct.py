"""Direct: ranks of a node add straight out of each other's memory, without messages or copies.

Each array lies in memory shared by all ranks of the node (`transport/shared_memory/`) and is cut
into P parts; rank r works on part r. Four ranks, parts a b c d; `4b` means "the sum of four ranks":

    rank     start         each sums its part of all arrays          ... and writes it to all
     0      a  b  c  d     a0 + a1 + a2 + a3 = 4a       |  into      4a 4b 4c 4d
     1      a  b  c  d     b0 + b1 + b2 + b3 = 4b       |  all       4a 4b 4c 4d
     2      a  b  c  d     c0 + c1 + c2 + c3 = 4c       |  four      4a 4b 4c 4d
     3      a  b  c  d     d0 + d1 + d2 + d3 = 4d       |  arrays    4a 4b 4c 4d
                       ^ all have arrived                          ^ all are done

    `direct_shared` writes the sum into rank 0's array alone, and all ranks read this array.

Index rule: part r is elements r n/P .. (r + 1) n/P, cut at cache lines. A part is processed in
tiles that stay in the core's cache from the sum to the write-back. Additions follow the order of
ranks, ((x0 + x1) + x2) + x3. Each part is summed once and copied: all ranks end with the same
bytes.

Cost: two exchanges of flags; 2n bytes through memory per rank (2Pn in all), n (P-1)/P added;
`direct_shared` n (P+1)/P per rank. No bytes are sent.

Arrays outside of node memory, and all short arrays, are copied through buffers (copy_through.py).
Ranks agree on this in the first exchange of flags. Its payload is a digest of the call and of the
array's location in node memory. If locations differ between ranks, all ranks use the buffers; if
calls differ, all ranks raise (signature.py).

Arrays on GPUs lie in memory that CUDA IPC maps (`cuda_ipc.py`). One kernel sums a part: it reads
the part in all arrays and writes the sum to all (`cuda_sum.py`). The host synchronizes: each rank
waits for its stream, then exchanges flags. GPU arrays in other memory, as tensors of PyTorch, are
copied piece by piece through buffers that CUDA IPC maps (`gpu_buffers.py`), and travel as messages
where it is refused. If all ranks share one GPU, `direct_shared` moves (P+1)n bytes, `direct` 2Pn.
On several GPUs `direct_shared` does the same as `direct`, since otherwise all ranks would read the
sum over one link.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from zlib import crc32

import numpy as np

from hpctrain.collectives import copy_through, gpu_buffers
from hpctrain.collectives import ring as messages
from hpctrain.collectives.chunks import views_of_part
from hpctrain.collectives.copy_through import part_offsets
from hpctrain.collectives.group import Group
from hpctrain.collectives.node_buffers import NodeBuffers
from hpctrain.collectives.reductions.operations import Operation, combine
from hpctrain.collectives.signature import (
    Signature,
    length_signature,
    must_match,
    must_match_in_node,
)
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, finish, on_device
from hpctrain.transport.shared_memory.host import SharedArrays

log = logging.getLogger(__name__)
TILE_BYTES = 128 << 10
#: Up to this length, one exchange of flags and copies are faster than two exchanges.
MAX_COPIED_BYTES = 8 << 10
_LOCATION = struct.Struct("<qq")


def direct(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`, all on one node.

    Without node memory this is a ring. Raises UsageError on several nodes.
    """
    bind_direct(group, x, op)()


def direct_shared(group: Group, x: np.ndarray, op: Operation) -> np.ndarray:
    """Return the array that holds the sum of all flat `x`: rank 0's, in node memory.

    The result is read-only, and valid until rank 0 writes to it again: before that, the caller must
    let all ranks finish reading, by an exchange of flags or a barrier. Other ranks' `x` is
    unchanged. If `x` is short, or lies outside of node memory, the result is the rank's own `x`.
    """
    return bind_direct(group, x, op, shared=True)()


def bind_direct(
    group: Group, x: np.ndarray, op: Operation, call: Signature | None = None, shared: bool = False
) -> Callable[[], np.ndarray]:
    """Return a call of `direct` or `direct_shared` on flat `x` that returns the sum.

    Local lookups are done now. In each call ranks compare `call`, by default the length of their
    arrays, and where the arrays lie. So other ranks may call `direct` itself.
    """
    buffers = _node_buffers(group)
    if buffers is None:
        return partial(_reduce_by_messages, group, x, op, call)
    if on_device(x):
        return partial(_reduce_on_gpus, group, buffers, x, op, call, shared)
    call = call or length_signature(x.nbytes)
    if x.nbytes <= MAX_COPIED_BYTES:
        return copy_through.bind_short_reduction(buffers, x, op, call)
    location = None if group.memory is None else group.memory.locate(x)
    tiles = [] if location is None else _own_tiles(buffers, location.arrays)
    payload, agree = call.payload ^ _location_hash(location), buffers.flags.agree

    def reduce() -> np.ndarray:
        if not agree(payload):
            must_match_in_node(buffers, call)
        elif location is not None:
            for tile in tiles:
                copy_through.sum_in_order(tile, op, tile[0])
                if not shared:
                    for operand in tile[1:]:
                        operand[:] = tile[0]
            agree()
            return location.arrays[0] if shared else x
        copy_through.reduce_long(buffers, x, op)
        return x

    return reduce


def reduce_scatter(
    group: Group, x: np.ndarray, op: Operation, offsets: Sequence[int] | None = None
) -> np.ndarray:
    """Return this rank's part of flat `x` as a view, summed over its node of `group`.

    Local rank r's part is `offsets[r]:offsets[r + 1]`, by default an even one at cache lines
    (`part_offsets`); the rest of `x` must stay unchanged until `all_gather`.
    """
    buffers, node = group.node_buffers, _node_group(group)
    offsets, rank = offsets or part_offsets(x, node.link.size), node.link.rank
    arrays = None if buffers is None else agree_on_arrays(group, buffers, x)
    if arrays is None:
        if mapped := gpu_buffers.mapped_buffers(group, x):
            return gpu_buffers.reduce_scatter(*mapped, x, op, offsets)
        return messages.reduce_scatter(node, x, op, offsets=offsets)
    if on_device(x):
        views = views_of_part(arrays, offsets, rank)
        combine(views, op, [views[rank]])
        return views[rank]
    scratch = group.scratch.buffer(x, TILE_BYTES // x.itemsize)
    for tile in _tiles([array[offsets[rank] : offsets[rank + 1]] for array in arrays]):
        block_sum = scratch[: tile[0].size]
        copy_through.sum_in_order(tile, op, block_sum)
        tile[rank][:] = block_sum
    return x[offsets[rank] : offsets[rank + 1]]


def all_gather(group: Group, x: np.ndarray, offsets: Sequence[int] | None = None) -> None:
    """Fill flat `x` with the parts of all ranks of the node; this rank's own is in place."""
    buffers, node = group.node_buffers, _node_group(group)
    offsets = offsets or part_offsets(x, node.link.size)
    arrays = None if buffers is None else agree_on_arrays(group, buffers, x)
    if buffers is None or arrays is None:
        if mapped := gpu_buffers.mapped_buffers(group, x):
            return gpu_buffers.all_gather(*mapped, x, offsets)
        return messages.all_gather(node, x, offsets)
    for rank, array in enumerate(arrays):
        if rank != node.link.rank:
            part = slice(offsets[rank], offsets[rank + 1])
            x[part] = array[part]
    finish(x)
    buffers.flags.agree()  # no rank may write while a neighbour still reads


def require_one_node(node_count: int) -> None:
    """Raise UsageError for several nodes: ranks of different nodes share no memory."""
    if node_count > 1:
        raise UsageError(
            f"algorithm direct works inside one node, seen {node_count}; use hierarchical, or auto"
        )


def _node_buffers(group: Group) -> NodeBuffers | None:
    """Return the node buffers of `group`, all on one node; None without shared memory."""
    require_one_node(len(group.nodes))
    buffers = group.node_buffers
    if buffers is None and group.link.size > 1 and group.link.rank == 0:
        _warn_of_messages()
    return buffers


@cache
def _warn_of_messages() -> None:
    log.warning("node neighbours share no memory: algorithm direct sends messages, as ring does")


def _node_group(group: Group) -> Group:
    """Return the group of this rank's node, for messages."""
    assert group.node is not None
    return Group(group.node, group.scratch)


Tiles = list[list[np.ndarray]]  #: of each tile, the arrays of all ranks


def _reduce_by_messages(
    group: Group, x: np.ndarray, op: Operation, call: Signature | None = None
) -> np.ndarray:
    if call is not None:
        must_match(group, call)
    messages.ring(group, x, op)
    return x


def _reduce_on_gpus(
    group: Group,
    buffers: NodeBuffers,
    x: Array,
    op: Operation,
    call: Signature | None,
    shared: bool,
) -> Array:
    """Reduce `x` on GPUs; with `shared`, on one GPU, the sum is in the first array alone."""
    arrays = agree_on_arrays(group, buffers, x, call)
    if arrays is None:
        if mapped := gpu_buffers.mapped_buffers(group, x):
            gpu_buffers.reduce(*mapped, x, op)
            return x
        return _reduce_by_messages(group, x, op)
    shared = shared and group.memory is not None and group.memory.on_one_gpu
    gpu_buffers.combine_parts(buffers, arrays, op, shared)
    return arrays[0] if shared else x


def agree_on_arrays(
    group: Group, buffers: NodeBuffers, x: Array, call: Signature | None = None
) -> list[Array] | None:
    """Return all ranks' arrays, ready to read; None unless all have the same location."""
    location = None if group.memory is None else group.memory.locate(x)
    call = call or length_signature(x.nbytes, on_device(x))
    finish(x)
    if buffers.flags.agree(call.payload ^ _location_hash(location)):
        return None if location is None else location.arrays
    must_match_in_node(buffers, call)
    return None


def _location_hash(location: SharedArrays | None) -> int:
    """Return a number for `location`: equal on all ranks if their locations are equal."""
    return 0 if location is None else crc32(_LOCATION.pack(location.number, location.offset))


def _own_tiles(buffers: NodeBuffers, arrays: list[np.ndarray]) -> Tiles:
    """Return the tiles of this rank's part of all `arrays`."""
    start, stop = part_offsets(arrays[0], len(arrays))[buffers.link.rank :][:2]
    return _tiles([array[start:stop] for array in arrays])


def _tiles(arrays: list[np.ndarray]) -> Tiles:
    """Return equally long `arrays` cut into tiles; a tile of all arrays fits a core's cache."""
    tile_length = TILE_BYTES // arrays[0].itemsize
    return [
        [a[start : start + tile_length] for a in arrays]
        for start in range(0, arrays[0].size, tile_length)
    ]
