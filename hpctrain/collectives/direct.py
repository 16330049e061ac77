"""Direct: node neighbours add straight out of each other's memory; no message, no copy.

Each array lies in memory that all ranks of the node see (`transport/memory.py`) and is cut into P
parts; rank r works on part r. Four ranks, parts a b c d; `4b` means "the sum of four ranks":

    rank     start         each sums its part of all arrays          ... and writes it to all
     0      a  b  c  d     a0 + a1 + a2 + a3 = 4a       |  into      4a 4b 4c 4d
     1      a  b  c  d     b0 + b1 + b2 + b3 = 4b       |  all       4a 4b 4c 4d
     2      a  b  c  d     c0 + c1 + c2 + c3 = 4c       |  four      4a 4b 4c 4d
     3      a  b  c  d     d0 + d1 + d2 + d3 = 4d       |  arrays    4a 4b 4c 4d
                       ^ all have arrived                          ^ all are done

    `direct_shared` writes the sum into rank 0's array alone, and all go on with that one.

Index rule: part r is elements r n/P .. (r + 1) n/P, cut at cache lines. A part is worked off in
blocks that stay in the core's cache from the sum to the write-back. Always in the order of ranks:
((x0 + x1) + x2) + x3, made once and copied: all ranks end with the same bytes.

Cost: two exchanges of flags; 2n bytes through memory per rank (2Pn in all), n (P-1)/P added;
`direct_shared` n (P+1)/P per rank. Whatever the sizes, no bytes are sent.

Arrays that lie elsewhere, and all short ones, go through slots (slots.py). Which way is taken is
agreed in the first exchange, whose payload is a digest of the call and of where the array lies. If
any rank's array lies elsewhere than the others', all go through slots; if calls differ, all ranks
raise (signature.py).

Arrays of GPUs lie in memory that CUDA IPC maps (`transport/ipc.py`); a part is one kernel, which
reads it in all arrays and writes it to all (fused.py). The host alone synchronises: each rank waits
for its stream, then come the flags. Arrays elsewhere travel as messages. Where one GPU belongs to
all ranks, `direct_shared` moves (P+1)n bytes there, `direct` 2Pn; across GPUs `direct_shared` is
`direct`, since all would read the sum over one link.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from zlib import crc32

import numpy as np

from hpctrain.collectives import ring as messages
from hpctrain.collectives import slots
from hpctrain.collectives.chunks import parts_of
from hpctrain.collectives.group import Group
from hpctrain.collectives.near import Near
from hpctrain.collectives.operations import Operation, combine
from hpctrain.collectives.signature import Signature, must_match, must_match_in_node, of_length
from hpctrain.collectives.slots import parts
from hpctrain.errors import UsageError
from hpctrain.transport.memory import Place
from hpctrain.xp import Array, finish, on_device

log = logging.getLogger(__name__)
BLOCK_BYTES = 128 << 10
ANYWHERE_BYTES = 8 << 10  # up to here one exchange and copies are faster than two and none
_PLACE = struct.Struct("<qq")


def direct(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`, all on one node.

    Without node memory this is a ring. Raises UsageError where there are several nodes.
    """
    prepared(group, x, op)()


def direct_shared(group: Group, x: np.ndarray, op: Operation) -> np.ndarray:
    """Return the array that holds the sum of all flat `x`: rank 0's, which neighbours see.

    It is for reading, and only until rank 0 writes there again: whoever lets rank 0 do so must
    first let all ranks finish, by an exchange of flags or a barrier. Other ranks' `x` stays as it
    is. Where `x` is short, or lies outside of node memory, it is the rank's own `x`.
    """
    return prepared(group, x, op, shared=True)()


def prepared(
    group: Group, x: np.ndarray, op: Operation, call: Signature | None = None, shared: bool = False
) -> Callable[[], np.ndarray]:
    """Return a call that does `direct` to flat `x`, or `direct_shared`, and returns the sum.

    What a rank can find out by itself is found out now; what ranks agree on, in each call: that
    all make the same `call`, by default with arrays of one length, and whether these lie at the
    same place. So other ranks may do the same without a prepared call.
    """
    near = _near(group)
    if near is None:
        return partial(_by_messages, group, x, op, call)
    if type(x) is not np.ndarray and on_device(x):
        return partial(_on_gpus, group, near, x, op, call, shared)
    call = call or of_length(x.nbytes)
    if x.nbytes <= ANYWHERE_BYTES:
        return slots.short_call(near, x, op, call)
    place = None if group.memory is None else group.memory.place(x)
    arrays = None if place is None else place.arrays
    blocks = None if arrays is None else _our_blocks(near, arrays)
    work, result = (
        (_sum_into_the_first, arrays) if shared and arrays else (_sum_and_write_back, [x])
    )
    payload, agree = call.payload ^ _number_of(place), near.flags.agree

    def reduce() -> np.ndarray:
        if not agree(payload):
            must_match_in_node(near, call)
        elif blocks is not None:
            work(blocks, op)
            agree()
            return result[0]
        slots.long(near, x, op)
        return x

    return reduce


def reduce_scatter(
    group: Group, x: np.ndarray, op: Operation, offsets: Sequence[int] | None = None
) -> np.ndarray:
    """Return the view of flat `x` that is this rank's part, summed over our node of `group`.

    Local rank r's part is `offsets[r]:offsets[r + 1]`, by default an even one at cache lines
    (`parts`); the rest of `x` must stay as it is until `all_gather`.
    """
    near, node = group.near, _of_node(group)
    offsets, rank = offsets or parts(x, node.link.size), node.link.rank
    arrays = None if near is None else agreed(group, near, x)
    if arrays is None:
        return messages.reduce_scatter(node, x, op, offsets=offsets)
    if on_device(x):
        theirs = parts_of(arrays, offsets, rank)
        combine(theirs, op, [theirs[rank]])
        return theirs[rank]
    total = group.scratch.beside(x, BLOCK_BYTES // x.itemsize)
    for block in _blocks([array[offsets[rank] : offsets[rank + 1]] for array in arrays]):
        out = total[: block[0].size]
        slots.add(block, op, out)
        block[rank][:] = out
    return x[offsets[rank] : offsets[rank + 1]]


def all_gather(group: Group, x: np.ndarray, offsets: Sequence[int] | None = None) -> None:
    """Fill flat `x` with the parts of all ranks of our node of `group`; our own is in place."""
    near, node = group.near, _of_node(group)
    offsets = offsets or parts(x, node.link.size)
    arrays = None if near is None else agreed(group, near, x)
    if near is None or arrays is None:
        return messages.all_gather(node, x, offsets)
    for rank, array in enumerate(arrays):
        if rank != node.link.rank:
            part = slice(offsets[rank], offsets[rank + 1])
            x[part] = array[part]
    finish(x)
    near.flags.agree()  # nobody changes what a neighbour still reads


def must_be_one_node(nodes: int) -> None:
    """Raise UsageError where ranks that are to share memory are on several nodes."""
    if nodes > 1:
        raise UsageError(
            f"algorithm direct works inside one node, seen {nodes}; use hierarchical, or auto"
        )


def _near(group: Group) -> Near | None:
    """Return what `group`, all on one node, shares; None where nothing is."""
    must_be_one_node(len(group.nodes))
    near = group.near
    if near is None and group.link.size > 1 and group.link.rank == 0:
        _say_that_messages_do()
    return near


@cache
def _say_that_messages_do() -> None:
    log.warning("node neighbours share no memory: algorithm direct sends messages, as ring does")


def _of_node(group: Group) -> Group:
    """Return the group of our node alone, for messages."""
    assert group.node is not None
    return Group(group.node, group.scratch)


Blocks = list[list[np.ndarray]]  #: of each block, all ranks' arrays


def _by_messages(
    group: Group, x: np.ndarray, op: Operation, call: Signature | None = None
) -> np.ndarray:
    if call is not None:
        must_match(group, call)
    messages.ring(group, x, op)
    return x


def _on_gpus(
    group: Group, near: Near, x: Array, op: Operation, call: Signature | None, shared: bool
) -> Array:
    """Reduce `x` of a GPU; with `shared`, on one GPU, the sum is in the first array alone."""
    arrays, rank = agreed(group, near, x, call), near.link.rank
    if arrays is None:
        return _by_messages(group, x, op)
    theirs = parts_of(arrays, parts(x, len(arrays)), rank)
    shared = shared and group.memory is not None and group.memory.on_one_gpu
    combine(theirs, op, theirs[:1] if shared else theirs)
    finish(x)
    near.flags.agree()
    return arrays[0] if shared else x


def agreed(group: Group, near: Near, x: Array, call: Signature | None = None) -> list[Array] | None:
    """Return all ranks' arrays once all may be read; None unless all lie at the same place."""
    on_gpu = type(x) is not np.ndarray and on_device(x)
    place = None if group.memory is None else group.memory.place(x)
    call = call or of_length(x.nbytes, on_gpu)
    finish(x)
    if near.flags.agree(call.payload ^ _number_of(place)):
        return None if place is None else place.arrays
    must_match_in_node(near, call)
    return None


def _number_of(place: Place | None) -> int:
    """Return a number that is the same on all ranks if their arrays lie at the same place."""
    return 0 if place is None else crc32(_PLACE.pack(place.number, place.offset))


def _our_blocks(near: Near, arrays: list[np.ndarray]) -> Blocks:
    """Return the blocks of our part of all `arrays`."""
    start, stop = parts(arrays[0], len(arrays))[near.link.rank :][:2]
    return _blocks([array[start:stop] for array in arrays])


def _blocks(arrays: list[np.ndarray]) -> Blocks:
    """Return equally long `arrays` in blocks that fit a core's cache, those of all together."""
    step = BLOCK_BYTES // arrays[0].itemsize
    return [[a[at : at + step] for a in arrays] for at in range(0, arrays[0].size, step)]


def _sum_into_the_first(blocks: Blocks, op: Operation) -> None:
    for first, *others in blocks:
        for other in others:
            op(first, other, out=first)


def _sum_and_write_back(blocks: Blocks, op: Operation) -> None:
    for first, *others in blocks:
        for other in others:
            op(first, other, out=first)
        for other in others:
            other[:] = first
