"""The lengths of the messages that each rank sends in each collective, exact for every length.

The other half of the cost model: cost.py tells the longest path when P divides n; this tells
what one rank counts in `bytes_sent` and `messages_sent`, also where chunks differ by an element.
P ranks, a vector of n elements, rank r; [a, b] is a message of a elements and one of b. Where
ranks are on several nodes, `nodes` are those of the group. What goes through node memory is no
message. Sources: those of the algorithms, in hpctrain/collectives/.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from hpctrain.collectives.chunks import SEGMENT_BYTES, STREAM_SEGMENT_BYTES, bounds
from hpctrain.collectives.ordered import SCRATCH_BYTES
from hpctrain.transport.shared_memory.host import ALIGN_BYTES


@dataclass(frozen=True)
class Call:
    """A collective call as rank `rank` makes it: `length` elements of `itemsize` bytes."""

    length: int
    itemsize: int
    ranks: int
    rank: int
    root: int = 0
    nodes: tuple[tuple[int, ...], ...] = ()
    offsets: tuple[int, ...] = ()  #: of the chunks, where they are not even
    blocks: int | None = None  #: of an ordered sum; P if not given

    @property
    def from_root(self) -> int:
        """The rank, counted from the root."""
        return (self.rank - self.root) % self.ranks

    def between(self, first: int, last: int, parts: int) -> int:
        """Return the elements of chunks `first` .. `last - 1` of `parts`."""
        return last * self.length // parts - first * self.length // parts

    def chunk(self, i: int) -> int:
        """Return the elements of chunk i of P."""
        i %= self.ranks
        if self.offsets:
            return self.offsets[i + 1] - self.offsets[i]
        return self.between(i, i + 1, self.ranks)

    def exceeds(self, nbytes: int) -> bool:
        """Return whether the longest chunk has more than `nbytes`."""
        return max(map(self.chunk, range(self.ranks))) * self.itemsize > nbytes

    @property
    def streams(self) -> bool:
        """Whether a ring between nodes is one stream of segments."""
        return len(self.nodes) > 1 and self.exceeds(STREAM_SEGMENT_BYTES)

    def segments(self, elements: int, nbytes: int = SEGMENT_BYTES) -> list[int]:
        """Return `elements` cut into segments of `nbytes`; none if there are no elements."""
        step = nbytes // self.itemsize
        return [min(step, elements - start) for start in range(0, elements, step)]


Messages = Callable[[Call], list[int]]


def reduce_scatter(call: Call) -> list[int]:
    """Return every chunk but r, in segments if one chunk is that long."""
    rest = [call.chunk(call.rank + i) for i in range(1, call.ranks)]
    if call.streams:
        return _streamed(call, rest)
    if not call.exceeds(SEGMENT_BYTES):
        return rest
    return [segment for chunk in rest for segment in call.segments(chunk)]


def all_gather(call: Call) -> list[int]:
    """Return every chunk but that of the right neighbour, r + 1; in segments only between nodes."""
    rest = [call.chunk(call.rank + 1 + i) for i in range(1, call.ranks)]
    return _streamed(call, rest) if call.streams else rest


def _streamed(call: Call, chunks: list[int]) -> list[int]:
    return [
        segment for item in chunks for segment in call.segments(item, STREAM_SEGMENT_BYTES) or [0]
    ]


def ring(call: Call) -> list[int]:
    """Return both halves."""
    return reduce_scatter(call) + all_gather(call)


def plain_ring(call: Call) -> list[int]:
    """Return both halves, uncut."""
    return [call.chunk(call.rank + i) for i in range(1, call.ranks)] + all_gather(call)


def hierarchical(call: Call) -> list[int]:
    """Return a reduce-scatter and an all-gather in the node, and a ring of our rail between nodes.

    Rails are cut at cache lines, as many as the smallest node has ranks. On one node: a ring.
    """
    if len(call.nodes) < 2:
        return ring(call)
    own = next(node for node in call.nodes if call.rank in node)
    local, rails = own.index(call.rank), min(map(len, call.nodes))
    cuts = bounds(call.length, rails, ALIGN_BYTES // call.itemsize)
    cuts += [call.length] * (len(own) - rails)
    inside = Call(call.length, call.itemsize, len(own), local, offsets=tuple(cuts))
    rail = [b - a for a, b in pairwise(cuts)][local]
    place = call.nodes.index(own)
    between = Call(rail, call.itemsize, len(call.nodes), place, nodes=call.nodes)
    return ring(inside) + (ring(between) if rail else [])


def reduce(call: Call) -> list[int]:
    """Return the vector once, in segments, to the parent; the root has none."""
    return call.segments(call.length) * (call.from_root != 0)


def broadcast(call: Call) -> list[int]:
    """Return the vector to each child.

    Rank r's children are r + b for the powers of two b below r's lowest set bit: as many as r ends
    in zeros, but no more than fit below P.
    """
    r, below = call.from_root, (call.ranks - call.from_root - 1).bit_length()
    zeros = (r & -r).bit_length() - 1 if r else below
    return call.segments(call.length) * min(zeros, below)


def tree(call: Call) -> list[int]:
    """Return the way up and the way down."""
    return reduce(call) + broadcast(call)


def double_tree(call: Call) -> list[int]:
    """Return n/2 to each neighbour in either tree: up to the parent, down to each child."""
    p, r = call.ranks, call.rank
    cut = STREAM_SEGMENT_BYTES if len(call.nodes) > 1 else SEGMENT_BYTES
    places = r + 1, ((r + 1) % p if p % 2 else p - 1 - r) + 1  # in the two trees, from 1
    halves = call.length // 2, call.length - call.length // 2
    return [
        segment
        for place, half in zip(places, halves, strict=True)
        for segment in call.segments(half, cut) * _neighbours(place, p)
    ]


def _neighbours(place: int, ranks: int) -> int:
    """Return parent and children of `place` = 1 .. P: odd ones are leaves, the last may lack one.

    The root is the largest power of two up to P.
    """
    children = 0 if place % 2 else 1 + (place < ranks)
    return children + (place != 1 << (ranks.bit_length() - 1))


def recursive_doubling(call: Call) -> list[int]:
    """Return the vector log2 Q times, once more to a folded rank, of which each sends it once."""
    core = 1 << (call.ranks.bit_length() - 1)
    times = core.bit_length() - 1 + (call.rank + core < call.ranks)
    return call.segments(call.length) * (1 if call.rank >= core else times)


def halving_doubling(call: Call) -> list[int]:
    """Return, for d = Q/2 .. 1, the d chunks of partner r xor d; on the way back, our own d.

    A folded rank hands over the lower half of its vector, and the upper once it is added; who
    takes it over sends the upper half before, and the whole vector in the end.
    """
    core = 1 << (call.ranks.bit_length() - 1)
    lower = call.length // 2
    upper = call.length - lower
    if call.rank >= core:
        return [*call.segments(lower), upper]
    extra = [*call.segments(upper), call.length] if call.rank + core < call.ranks else []
    distances = [1 << k for k in range(core.bit_length() - 1)]
    arguments = [_block(call, call.rank ^ d, d, core) for d in distances]
    saved = [_block(call, call.rank, d, core) for d in distances]
    return extra + [segment for m in arguments + saved for segment in call.segments(m)]


def _block(call: Call, i: int, d: int, core: int) -> int:
    """Return the elements of the d chunks of Q among which chunk i lies."""
    return call.between(i // d * d, i // d * d + d, core)


def ordered_reduce_scatter(call: Call) -> list[int]:
    """Return every chunk but r, m times, in segments: m is the number of subtotals that r holds."""
    blocks = call.blocks or call.ranks
    at = [rank * blocks // call.ranks for rank in range(call.ranks + 1)]
    subtotals = [_subtotals(a, b, blocks) for a, b in pairwise(at)]
    step = max(1, SCRATCH_BYTES // (call.itemsize * sum(subtotals)))
    rest = (call.chunk(call.rank + i) for i in range(1, call.ranks))
    cut = [min(step, chunk - start) for chunk in rest for start in range(0, chunk, step)]
    return cut * subtotals[call.rank]


def _subtotals(first: int, last: int, blocks: int) -> int:
    """Return into how few subtotals of the tree blocks `first` .. `last` - 1 fit.

    From `first` on one can cover 2^k blocks if 2^k divides it, fewer where there are no more.
    """
    count = 0
    while first < last:
        width = first & -first or 1 << blocks.bit_length()
        while min(first + width, blocks) > last:
            width //= 2
        first, count = first + width, count + 1
    return count


def doubling(call: Call) -> list[int]:
    """Return our own d chunks for d = 1, 2, .. P/2; round the ring if P is no power of two."""
    if call.ranks & (call.ranks - 1):
        return all_gather(call)
    return [_block(call, call.rank, 1 << k, call.ranks) for k in range(call.ranks.bit_length() - 1)]


def broadcasts(call: Call) -> list[int]:
    """Return each rank's chunk as often as in a broadcast from it."""
    of_each = (replace(call, length=call.chunk(i), root=i) for i in range(call.ranks))
    return [segment for item in of_each for segment in broadcast(item)]


def gather(call: Call) -> list[int]:
    """Return the own chunk; the root has none to send."""
    return [call.chunk(call.rank)] * (call.rank != call.root)


def scatter(call: Call) -> list[int]:
    """Return, at the root, every other rank's chunk."""
    return [call.chunk(call.root + i) for i in range(1, call.ranks) if call.rank == call.root]


def all_to_all(call: Call) -> list[int]:
    """Return every chunk but the own; P divides n."""
    return [call.length // call.ranks] * (call.ranks - 1)


def all_gather_short(call: Call) -> list[int]:
    """Return 1, 2, 4, ... blocks of n/P, as many as are still missing; P divides n."""
    p, doublings = call.ranks, range((call.ranks - 1).bit_length())
    return [min(1 << k, p - (1 << k)) * (call.length // p) for k in doublings]


MESSAGES: dict[str, Messages] = {
    "ring": ring,
    "plain-ring": plain_ring,
    "hierarchical": hierarchical,
    "tree": tree,
    "double-tree": double_tree,
    "recursive-doubling": recursive_doubling,
    "halving-doubling": halving_doubling,
    "reduce-scatter": reduce_scatter,
    "all-gather": all_gather,
    "ordered-reduce-scatter": ordered_reduce_scatter,
    "doubling": doubling,
    "broadcasts": broadcasts,
    "reduce": reduce,
    "broadcast": broadcast,
    "gather": gather,
    "scatter": scatter,
    "all-to-all": all_to_all,
    "all-gather-short": all_gather_short,
}
