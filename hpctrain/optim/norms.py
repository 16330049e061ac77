"""Norms that have the same bytes however the flat arrays are cut into shards.

A *piece* is the part of one slot in one block. The holder of a block adds the squares of its pieces
in float64; `total` returns the rows of all shards on every rank, which adds them in order.
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

from hpctrain.core.xp import Array, namespace, on_device, raw_kernel, to_host
from hpctrain.optim.optimizer import BLOCK, TensorSlot, Total, blocks


class BlockPiece(NamedTuple):
    """The elements `at` of the flat arrays, which belong to the slot of index `slot`."""

    slot: int
    at: slice


def pieces(size: int, slots: Sequence[TensorSlot]) -> Iterator[BlockPiece]:
    """Yield the pieces that lie in a shard of `size` elements, in order; gaps are in none."""
    for i, slot in enumerate(slots):
        stop = slot.offset + slot.size
        for block in _blocks_of(slot):
            if 0 <= block < size:
                yield BlockPiece(i, slice(max(block, slot.offset), min(block + BLOCK, stop)))


def by_slot(rows: np.ndarray, slots: Sequence[TensorSlot]) -> np.ndarray:
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


def squares_of(arrays: Sequence[Array], pieces: Sequence[slice]) -> np.ndarray:
    """Return the sums of squares of each piece of flat `arrays`, float64 (pieces, arrays).

    They are added in float64, in an order that depends on the piece alone.
    """
    if on_device(arrays[0]):
        return _on_device(arrays, pieces)
    scratch = workspace(arrays[0])
    rows = [[squares(x[at], scratch) for x in arrays] for at in pieces]
    return np.array(rows).reshape(-1, len(arrays))


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
    norm = math.sqrt(total(squares_of([grad], list(blocks(grad.size)))).sum())
    return limit / norm if norm > limit else 1.0


def is_vector(slot: TensorSlot) -> bool:
    """Return whether a tensor has at most one dim, as biases and the scales of norms have."""
    return len(slot.shape) < 2


def decayed(size: int, slots: Sequence[TensorSlot], exempt_vectors: bool) -> list[list[slice]]:
    """Return for each block the parts of it that decay: all of it, or those of no vector."""
    if not exempt_vectors:
        return [[s] for s in blocks(size)]
    parts: list[list[slice]] = [[] for _ in blocks(size)]
    for i, at in pieces(size, slots):
        if not is_vector(slots[i]):
            parts[at.start // BLOCK].append(at)
    return parts


def runs(size: int, slots: Sequence[TensorSlot], apart: bool) -> Iterator[tuple[slice, bool]]:
    """Yield the slices of one kernel each, and whether they decay: all, or with `apart` the slots.

    Gaps between slots may be in none.
    """
    if not apart:
        yield slice(0, size), True
        return
    for i, at in wholes(size, slots):
        yield at, not is_vector(slots[i])


def wholes(size: int, slots: Sequence[TensorSlot]) -> Iterator[BlockPiece]:
    """Yield the piece of each slot that lies in a shard of `size` elements."""
    for i, slot in enumerate(slots):
        start, stop = max(slot.offset, 0), min(slot.offset + slot.size, size)
        if start < stop:
            yield BlockPiece(i, slice(start, stop))


THREADS = 256
#: One block of threads per piece: each thread adds every 256th square, then they are added in a
#: tree. The order depends on the length of the piece alone.
SQUARES = """
extern "C" __global__
void squares(const REAL* x, const long long* starts, const long long* stops, double* sums) {
    __shared__ double part[256];
    double sum = 0;
    for (long long i = starts[blockIdx.x] + threadIdx.x; i < stops[blockIdx.x]; i += 256) {
        double value = x[i];
        sum += value * value;
    }
    part[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}
"""


def _on_device(arrays: Sequence[Array], pieces: Sequence[slice]) -> np.ndarray:
    """As `squares_of`, with one kernel per array, and one small copy to the host."""
    x, xp = arrays[0], namespace(arrays[0])
    sums = xp.zeros((len(arrays), len(pieces)), np.float64)
    if pieces:
        starts, stops = xp.asarray(np.array([(s.start, s.stop) for s in pieces], np.int64).T.copy())
        source = SQUARES.replace("REAL", {"float32": "float", "float64": "double"}[x.dtype.name])
        kernel = raw_kernel(x, source, "squares")
        for array, into in zip(arrays, sums, strict=True):
            kernel((len(pieces),), (THREADS,), (array, starts, stops, into))
    return np.ascontiguousarray(to_host(sums).T)


def _blocks_of(slot: TensorSlot) -> range:
    return range(slot.offset // BLOCK * BLOCK, slot.offset + slot.size, BLOCK)
