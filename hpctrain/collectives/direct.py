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

Arrays that lie elsewhere, and all short ones, go through slots of node memory, two per rank:
copied in, one exchange, and every rank adds all that it needs into its own array.

    slot 0   [ copy 0 ]|[ add 0  ]          |[ add 2 ]
    slot 1             |[ copy 1 ]|[ add 1 ]            | exchange

Which way is taken is agreed in the first exchange: each rank says where its array lies. If any
rank's array lies elsewhere than the others', all go through slots.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from functools import cache
from zlib import crc32

import numpy as np

from hpctrain.collectives import ring as messages
from hpctrain.collectives.agree import all_gather_bytes
from hpctrain.collectives.chunks import bounds, segments
from hpctrain.collectives.group import Group
from hpctrain.collectives.near import SLOT_BYTES, Near
from hpctrain.collectives.operations import Operation
from hpctrain.errors import TransportError, UsageError
from hpctrain.transport.memory import ALIGN_BYTES

log = logging.getLogger(__name__)
BLOCK_BYTES = 128 << 10
SHORT_BYTES = 8 << 10
_PLACE = struct.Struct("<qqq")
_NOWHERE = (-1, 0)


def direct(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`, all on one node.

    Without node memory this is a ring. Raises UsageError where there are several nodes.
    """
    near = _near(group)
    if near is None:
        messages.ring(group, x, op)
    elif (arrays := _all_arrays(group, near, x, op)) is not None:
        _sum_part(near, arrays, op, write_back=True)
        near.flags.exchange()


def direct_shared(group: Group, x: np.ndarray, op: Operation) -> np.ndarray:
    """Return the array that holds the sum of all flat `x`: rank 0's, which neighbours see.

    It is for reading, and only until rank 0 writes there again: whoever lets rank 0 do so must
    first let all ranks finish, by an exchange of flags or a barrier. Other ranks' `x` stays as it
    is. Where `x` is short, or lies outside of node memory, it is the rank's own `x`.
    """
    near = _near(group)
    if near is None:
        messages.ring(group, x, op)
    elif (arrays := _all_arrays(group, near, x, op)) is not None:
        _sum_part(near, arrays, op, write_back=False)
        near.flags.exchange()
        return arrays[0]
    return x


def reduce_scatter(
    group: Group, x: np.ndarray, op: Operation, offsets: Sequence[int] | None = None
) -> np.ndarray:
    """Return the view of flat `x` that is this rank's part, summed over our node of `group`.

    Local rank r's part is `offsets[r]:offsets[r + 1]`, by default an even one at cache lines
    (`parts`); the rest of `x` must stay as it is until `all_gather`.
    """
    near, node = group.near, _of_node(group)
    offsets = offsets or parts(x, node.link.size)
    place = None if near is None else agreed(group, near, x)
    if place is None:
        return messages.reduce_scatter(node, x, op, offsets=offsets)
    rank = node.link.rank
    mine = [array[offsets[rank] : offsets[rank + 1]] for array in place]
    total = group.scratch.take(min(mine[0].size, BLOCK_BYTES // x.itemsize), x.dtype)
    for block in _blocks(mine):
        out = total[: block[0].size]
        _sum(block, op, out)
        block[rank][...] = out
    return mine[rank]


def all_gather(group: Group, x: np.ndarray, offsets: Sequence[int] | None = None) -> None:
    """Fill flat `x` with the parts of all ranks of our node of `group`; our own is in place."""
    near, node = group.near, _of_node(group)
    offsets = offsets or parts(x, node.link.size)
    place = None if near is None else agreed(group, near, x)
    if near is None or place is None:
        return messages.all_gather(node, x, offsets)
    for rank, array in enumerate(place):
        if rank != node.link.rank:
            part = slice(offsets[rank], offsets[rank + 1])
            x[part] = array[part]
    near.flags.exchange()  # nobody changes what a neighbour still reads


def parts(x: np.ndarray, ranks: int) -> list[int]:
    """Return `ranks + 1` offsets that cut flat `x` evenly, at cache lines from its start."""
    return bounds(x.size, ranks, ALIGN_BYTES // x.itemsize)


def _near(group: Group) -> Near | None:
    """Return what `group`, all on one node, shares; None where nothing is."""
    if len(group.nodes) > 1:
        raise UsageError(
            f"algorithm direct works inside one node, seen {len(group.nodes)}; "
            "use hierarchical, or auto"
        )
    if group.near is None and group.link.size > 1 and group.link.rank == 0:
        _say_that_messages_do()
    return group.near


@cache
def _say_that_messages_do() -> None:
    log.warning("node neighbours share no memory: algorithm direct sends messages, as ring does")


def _of_node(group: Group) -> Group:
    """Return the group of our node alone, for messages."""
    assert group.node is not None
    return Group(group.node, group.scratch)


def _all_arrays(group: Group, near: Near, x: np.ndarray, op: Operation) -> list[np.ndarray] | None:
    """Return all ranks' arrays once all may be read; None if `x` was reduced through slots."""
    if x.nbytes > SHORT_BYTES:
        arrays = agreed(group, near, x)
        if arrays is None:
            for segment in segments(x, SLOT_BYTES):
                _through_slots(near, segment, op)
        return arrays
    _through_slots(near, x, op)
    return None


def _through_slots(near: Near, x: np.ndarray, op: Operation) -> None:
    """Reduce `x`, no longer than a slot, by one exchange."""
    slots = near.slots_like(x)
    slots[near.link.rank][...] = x
    _same_length(near, near.flags.exchange(_said(_NOWHERE, x)), x)
    _sum(slots, op, x)


def agreed(group: Group, near: Near, x: np.ndarray) -> list[np.ndarray] | None:
    """Return all ranks' arrays once all may be read; None unless all lie at the same place."""
    place = None if group.memory is None else group.memory.place(x)
    said = near.flags.exchange(_said(_NOWHERE if place is None else place[:2], x))
    if said.count(said[0]) == len(said):
        return None if place is None else place.arrays
    _same_length(near, said, x)
    return None


def _said(place: tuple[int, int], x: np.ndarray) -> int:
    return crc32(_PLACE.pack(*place, x.nbytes))


def _same_length(near: Near, said: list[int], x: np.ndarray) -> None:
    """Raise TransportError, on all ranks, if lengths differ where what was `said` differs."""
    if said.count(said[0]) == len(said):
        return
    lengths = [int(one) for one in all_gather_bytes(near.link, b"%d" % x.nbytes)]
    if len(set(lengths)) > 1:
        raise TransportError(
            f"rank {near.link.rank}: direct: expected arrays of one length, seen "
            + ", ".join(f"{n} bytes on rank {r}" for r, n in enumerate(lengths))
            + ". All ranks must call with arrays of the same length and dtype, in the same order."
        )


def _sum_part(near: Near, arrays: list[np.ndarray], op: Operation, write_back: bool) -> None:
    """Sum our part of all `arrays` into the first, and copy it to the others if `write_back`."""
    offsets, rank = parts(arrays[0], len(arrays)), near.link.rank
    for first, *others in _blocks([a[offsets[rank] : offsets[rank + 1]] for a in arrays]):
        for other in others:
            op(first, other, out=first)
        if write_back:
            for other in others:
                other[...] = first


def _blocks(arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Return equally long `arrays` in blocks that fit a core's cache, those of all together."""
    step = max(1, BLOCK_BYTES // arrays[0].itemsize)
    cuts = range(0, arrays[0].size, step)
    return [[a[start : start + step] for a in arrays] for start in cuts]


def _sum(arrays: list[np.ndarray], op: Operation, out: np.ndarray) -> None:
    """Sum `arrays` in their order into `out`, which is none of them but perhaps the first."""
    first, second, *others = arrays
    op(first, second, out=out)
    for other in others:
        op(out, other, out=out)
