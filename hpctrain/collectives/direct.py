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
agreed in the first exchange: each rank says where its array lies. If any rank's array lies
elsewhere than the others', all go through slots.

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
from functools import cache, lru_cache, partial
from zlib import crc32

import numpy as np

from hpctrain.collectives import ring as messages
from hpctrain.collectives import slots
from hpctrain.collectives.chunks import parts_of
from hpctrain.collectives.group import Group
from hpctrain.collectives.near import LENGTHS_KEPT, SHORT_BYTES, Near
from hpctrain.collectives.operations import Operation, combine
from hpctrain.collectives.slots import parts
from hpctrain.errors import UsageError
from hpctrain.transport.memory import Place
from hpctrain.xp import Array, finish, on_device

log = logging.getLogger(__name__)
BLOCK_BYTES = 128 << 10
ANYWHERE_BYTES = 8 << 10  # up to here one exchange and copies are faster than two and none
_PLACE = struct.Struct("<qqq")


def direct(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`, all on one node.

    Without node memory this is a ring. Raises UsageError where there are several nodes.
    """
    _reduce(group, x, op, _sum_and_write_back)


def direct_shared(group: Group, x: np.ndarray, op: Operation) -> np.ndarray:
    """Return the array that holds the sum of all flat `x`: rank 0's, which neighbours see.

    It is for reading, and only until rank 0 writes there again: whoever lets rank 0 do so must
    first let all ranks finish, by an exchange of flags or a barrier. Other ranks' `x` stays as it
    is. Where `x` is short, or lies outside of node memory, it is the rank's own `x`.
    """
    arrays = _reduce(group, x, op, _sum_into_the_first)
    return x if arrays is None else arrays[0]


def bound(
    group: Group, x: np.ndarray, op: Operation, shared: bool = False
) -> Callable[[], np.ndarray]:
    """Return a call that does `direct` to flat `x`, or `direct_shared`, and returns the sum.

    All there is to look up and to agree on is done now: all ranks must call here, and then the
    bound calls in the same order.
    """
    near = _near(group)
    if near is None:
        return partial(_and_return, partial(messages.ring, group, x, op), x)
    if on_device(x):
        in_place = partial(_and_return, partial(direct, group, x, op), x)
        return partial(direct_shared, group, x, op) if shared else in_place
    if x.nbytes <= ANYWHERE_BYTES:
        return slots.short_call(near, x, op, _said_elsewhere(x.nbytes))
    arrays = agreed(group, near, x)
    if arrays is None and x.nbytes <= SHORT_BYTES:
        return slots.short_call(near, x, op, _said_elsewhere(x.nbytes))
    if arrays is None:
        return partial(_and_return, partial(slots.long, near, x, op), x)
    blocks, agree = _our_blocks(near, arrays), near.flags.agree
    work, result = (_sum_into_the_first, arrays[0]) if shared else (_sum_and_write_back, x)

    def call() -> np.ndarray:
        agree()
        work(blocks, op)
        agree()
        return result

    return call


def prepared(group: Group, x: np.ndarray, op: Operation) -> Callable[[], object]:
    """Return a call that does `direct` to flat `x`, which other ranks may do without one.

    What this rank can find out by itself is found out now; what ranks agree on, in each call.
    """
    near = _near(group)
    if near is None:
        return partial(messages.ring, group, x, op)
    if on_device(x):
        return partial(direct, group, x, op)
    if x.nbytes <= ANYWHERE_BYTES:
        return slots.short_call(near, x, op, _said_elsewhere(x.nbytes))
    place = None if group.memory is None else group.memory.place(x)
    said, agree = _said(x, place), near.flags.agree
    blocks = None if place is None else _our_blocks(near, place.arrays)

    def call() -> None:
        if not agree(said):
            slots.must_be_one_length(near, x)
        elif blocks is not None:
            _sum_and_write_back(blocks, op)
            agree()
            return
        slots.long(near, x, op)

    return call


def _and_return(work: Callable[[], None], x: np.ndarray) -> np.ndarray:
    work()
    return x


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


def _reduce(
    group: Group, x: np.ndarray, op: Operation, work: Callable[[Blocks, Operation], None]
) -> list[np.ndarray] | None:
    """Do `work` and return all ranks' arrays; None where `x` itself was reduced otherwise."""
    near = _near(group)
    if near is None:
        messages.ring(group, x, op)
    elif type(x) is not np.ndarray and on_device(x):
        return _reduce_on_gpus(group, near, x, op, work is _sum_into_the_first)
    elif x.nbytes <= ANYWHERE_BYTES:
        slots.short(near, x, op, _said_elsewhere(x.nbytes))
    elif (arrays := agreed(group, near, x)) is None:
        slots.long(near, x, op)
    else:
        work(_our_blocks(near, arrays), op)
        near.flags.agree()
        return arrays
    return None


def _reduce_on_gpus(
    group: Group, near: Near, x: Array, op: Operation, shared: bool
) -> list[Array] | None:
    """Do as `_reduce`; with `shared`, on one GPU, the sum is in the first of the arrays alone."""
    arrays, rank = agreed(group, near, x), near.link.rank
    if arrays is None:
        messages.ring(group, x, op)
        return None
    theirs = parts_of(arrays, parts(x, len(arrays)), rank)
    shared = shared and group.memory is not None and group.memory.on_one_gpu
    combine(theirs, op, theirs[:1] if shared else theirs)
    finish(x)
    near.flags.agree()
    return arrays if shared else None


def agreed(group: Group, near: Near, x: Array) -> list[Array] | None:
    """Return all ranks' arrays once all may be read; None unless all lie at the same place."""
    place = None if group.memory is None else group.memory.place(x)
    said = _said(x, place)
    if type(x) is not np.ndarray and on_device(x):
        finish(x)
        said ^= place is None  # of arrays that lie anywhere, a GPU's take another way
    if near.flags.agree(said):
        return None if place is None else place.arrays
    slots.must_be_one_length(near, x)
    return None


def _said(x: np.ndarray, place: Place | None) -> int:
    """Return what all ranks must say: how long their arrays are, and where they lie."""
    if place is None:
        return _said_elsewhere(x.nbytes)
    return crc32(_PLACE.pack(place.number, place.offset, x.nbytes))


@lru_cache(LENGTHS_KEPT)
def _said_elsewhere(nbytes: int) -> int:
    """Return what is said of an array that must lie nowhere in particular."""
    return crc32(_PLACE.pack(-1, 0, nbytes))


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
