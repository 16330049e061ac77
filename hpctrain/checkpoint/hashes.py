"""Hashes of arrays in units that depend neither on the number of ranks nor on their shards.

An array is cut at blocks of 65,536 elements, as shards are, and at the bounds of its slots, the
places of tensors. So no shard cuts a unit, whoever holds a unit hashes it, and a reader verifies
any range by the units in it:

    blocks    |        0        |        1        |        2        |
    slots     | a a a a b b b b | b b b b c c . . | d d d d d d . . |
    units     | a a a a|b b b b | b b b b|c c|. . | d d d d d d|. . |

    hash of a slot      SHA-256 of the hashes of its units, in order
    hash of a model     SHA-256 of the hashes of its slots, in order: `params_sha256`
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

BLOCK_ELEMENTS = 65_536  #: elements; a part of the format: shards begin at multiples of it
Span = tuple[int, int]  #: the first element, and the end


def distinct_bounds(spans: Iterable[Span]) -> list[int]:
    """Return the bounds of `spans`, ascending, each once."""
    return sorted({bound for span in spans for bound in span})


def unit_bounds(start: int, stop: int, slot_edges: Sequence[int] = ()) -> list[int]:
    """Return the bounds of the units in elements `start` .. `stop` of an array, both included."""
    inner_edges = slot_edges[bisect_right(slot_edges, start) : bisect_left(slot_edges, stop)]
    next_block = (start // BLOCK_ELEMENTS + 1) * BLOCK_ELEMENTS
    return sorted({start, stop, *inner_edges, *range(next_block, stop, BLOCK_ELEMENTS)})


def slot_sha256(slot: Span, unit_sha256: Callable[[int, int], str]) -> str:
    """Return the hash of a slot, given the hash of the unit between any two of its bounds."""
    return combine_hashes(unit_sha256(*unit) for unit in pairwise(unit_bounds(*slot)))


def combine_hashes(hashes: Iterable[str]) -> str:
    """Return the SHA-256 of `hashes`, 32 bytes each, one after the other."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, hashes))).hexdigest()
