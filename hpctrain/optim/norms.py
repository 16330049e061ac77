"""Norms that have the same bytes however the flat arrays are cut into shards.

A *piece* is what one slot has in one block. Whoever holds a block adds the squares of its pieces
in float64; `total` hands the rows of all shards to everybody, and everybody adds them in order.
Shards begin at blocks, so a piece is never cut further and nothing depends on their number.

    blocks    |        0        |        1        |        2        |
    slots     | a a a a b b b b b b b b c . . . d d d d d d d d . . |
    pieces    | a a a a b b b b | b b b b c     d | d d d d d d d   |    rows: a b b c d d
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.optim.optimizer import BLOCK, Slot, Total, blocks
from hpctrain.xp import Array, namespace


class Piece(NamedTuple):
    """The elements `at` of the flat arrays, which belong to the slot of index `slot`."""

    slot: int
    at: slice


def pieces(size: int, slots: Sequence[Slot]) -> Iterator[Piece]:
    """Yield the pieces that lie in a shard of `size` elements, in order; gaps are in none."""
    for i, slot in enumerate(slots):
        stop = slot.offset + slot.size
        for block in _blocks_of(slot):
            if 0 <= block < size:
                yield Piece(i, slice(max(block, slot.offset), min(block + BLOCK, stop)))


def by_slot(rows: np.ndarray, slots: Sequence[Slot]) -> np.ndarray:
    """Return the sums of the rows of each slot, float64 (slots, columns).

    `rows`: float64 (pieces of all shards, columns), in order.
    """
    sums = np.zeros((len(slots), rows.shape[1]))
    owners = np.repeat(np.arange(len(slots)), [len(_blocks_of(slot)) for slot in slots])
    np.add.at(sums, owners, rows)  # one after the other: no choice of order is left to NumPy
    return sums


def workspace(x: Array) -> Array:
    """Return scratch for `squares` of one block of `x`."""
    return namespace(x).empty(min(BLOCK, x.size), np.float64)


def squares(x: Array, scratch: Array) -> float:
    """Return the sum of the squares of flat `x`, added in float64."""
    # Not a BLAS product: its order of adding depends on the number of threads.
    t = scratch[: x.size]
    t[...] = x
    t *= t
    return float(t.sum())


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return above / below, and 1 where either is 0: a tensor of zeros must be able to move."""
    return np.divide(above, below, out=np.ones_like(above), where=(above > 0) & (below > 0))


def clip_factor(grad: Array, limit: float | None, total: Total) -> float:
    """Return the factor that brings the norm of all gradients down to `limit`; 1 if it is below.

    `grad` is not written. Source: Pascanu, Mikolov and Bengio (2013), algorithm 1.
    """
    if limit is None:
        return 1.0
    scratch = workspace(grad)
    own = [squares(grad[s], scratch) for s in blocks(grad.size)]
    norm = math.sqrt(total(np.array(own).reshape(-1, 1)).sum())
    return limit / norm if norm > limit else 1.0


def is_vector(slot: Slot) -> bool:
    """Return whether a tensor has at most one dim, as biases and the scales of norms have."""
    return len(slot.shape) < 2


def decayed(size: int, slots: Sequence[Slot], exempt_vectors: bool) -> list[list[slice]]:
    """Return for each block the parts of it that decay: all of it, or those of no vector."""
    if not exempt_vectors:
        return [[s] for s in blocks(size)]
    parts: list[list[slice]] = [[] for _ in blocks(size)]
    for i, at in pieces(size, slots):
        if not is_vector(slots[i]):
            parts[at.start // BLOCK].append(at)
    return parts


def _blocks_of(slot: Slot) -> range:
    return range(slot.offset // BLOCK * BLOCK, slot.offset + slot.size, BLOCK)
