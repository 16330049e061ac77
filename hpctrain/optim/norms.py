"""Norms that have the same bytes for any division of the flat arrays into shards.

A *piece* is the part of a slot in a block. The rank with a block adds the squares of its pieces
in float64. `gather_rows` returns every shard's rows on every rank, which adds them in order.
Shards begin at blocks, so a piece lies in one shard, and the sums do not depend on the number of
shards.

    blocks    |        0        |        1        |        2        |
    slots     | a a a a b b b b b b b b c . . . d d d d d d d d . . |
    pieces    | a a a a b b b b | b b b b c     d | d d d d d d d   |    rows: a b b c d d
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hpctrain.core.xp import Array, namespace, on_device, raw_kernel, to_host
from hpctrain.optim.optimizer import BLOCK_ELEMENTS, GatherRows, TensorSlot


class BlockPiece(NamedTuple):
    """A range of elements of the flat arrays that belongs to the slot of index `slot`."""

    slot: int
    elements: slice


def pieces(size: int, slots: Sequence[TensorSlot]) -> Iterator[BlockPiece]:
    """Yield the pieces of a shard of `size` elements, in order; gaps belong to no piece."""
    indices, ranges = piece_ranges(size, slots)
    for i, (start, stop) in zip(indices.tolist(), ranges.tolist(), strict=True):
        yield BlockPiece(i, slice(start, stop))


def piece_ranges(size: int, slots: Sequence[TensorSlot]) -> tuple[np.ndarray, np.ndarray]:
    """Return the slot's index of each piece, int64 (pieces,), and its start and stop, (pieces, 2).

    Both are cached, and read-only: each update asks, and a large model has thousands of pieces.
    """
    return _piece_ranges(size, tuple(slots))


@lru_cache(maxsize=16)
def _piece_ranges(size: int, slots: tuple[TensorSlot, ...]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.array([slot.offset for slot in slots], np.int64)
    stops = offsets + np.array([slot.size for slot in slots], np.int64)
    counts = np.array([len(_blocks_of(slot)) for slot in slots], np.int64)
    indices = np.repeat(np.arange(len(slots)), counts)
    positions = np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = (offsets[indices] // BLOCK_ELEMENTS + positions) * BLOCK_ELEMENTS
    starts = np.maximum(blocks, offsets[indices])
    ranges = np.stack((starts, np.minimum(blocks + BLOCK_ELEMENTS, stops[indices])), axis=1)
    is_inside = (blocks >= 0) & (blocks < size)
    indices, ranges = indices[is_inside], ranges[is_inside]
    for array in (indices, ranges):
        array.setflags(write=False)
    return indices, ranges


def sum_by_slot(rows: np.ndarray, slots: Sequence[TensorSlot]) -> np.ndarray:
    """Return the sums of the rows of each slot, float64 (slots, columns).

    `rows` has one row per piece of the whole model, in order, float64.
    """
    sums = np.zeros((len(slots), rows.shape[1]))
    slot_indices = np.repeat(np.arange(len(slots)), [len(_blocks_of(slot)) for slot in slots])
    np.add.at(sums, slot_indices, rows)  # unlike sum, adds in the order of the rows
    return sums


def ordered_rows(
    parts: Sequence[np.ndarray], names: Sequence[Collection[str]], slots: Sequence[TensorSlot]
) -> np.ndarray:
    """Return the rows of a whole model in the order of its slots, where ranks hold some slots each.

    `parts[r]` are the rows of rank r, in the order of its slots; `names[r]` are their names. Each
    slot is on one rank. Raises ValueError unless the parts have a row for each piece.
    """
    rank_of_name = {name: rank for rank, rank_names in enumerate(names) for name in rank_names}
    row_ranks = np.repeat(
        [rank_of_name[slot.name] for slot in slots], [len(_blocks_of(slot)) for slot in slots]
    )
    counts = np.bincount(row_ranks, minlength=len(parts)).tolist()
    if counts != [len(part) for part in parts]:
        raise ValueError(f"expected {counts} rows of each rank, seen {[len(p) for p in parts]}")
    joined_rows = np.concatenate(parts)
    rows = np.empty_like(joined_rows)
    rows[np.argsort(row_ranks, kind="stable")] = joined_rows
    return rows


def make_scratch(x: Array) -> Array:
    """Return scratch for `sum_squares` of a block of `x`."""
    return namespace(x).empty(min(BLOCK_ELEMENTS, x.size), np.float64)


def sum_squares_by_piece(arrays: Sequence[Array], ranges: np.ndarray) -> np.ndarray:
    """Return the sums of squares of each piece of flat `arrays`, float64 (pieces, arrays).

    `ranges`: as from `piece_ranges`. The squares are added in float64, in an order that depends
    only on the length of the piece.
    """
    if on_device(arrays[0]):
        return _sum_squares_on_device(arrays, ranges)
    scratch = make_scratch(arrays[0])
    rows = [[sum_squares(x[i:j], scratch) for x in arrays] for i, j in ranges.tolist()]
    return np.array(rows).reshape(-1, len(arrays))


def sum_squares(x: Array, scratch: Array) -> float:
    """Return the sum of the squares of flat `x`, added in float64."""
    # A BLAS dot product would add in an order that depends on the number of threads.
    t = scratch[: x.size]
    t[...] = x
    t *= t
    return float(t.sum())


def safe_ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the ratio, and 1 where either number is 0, so that a tensor of zeros can change."""
    is_positive = (numerator > 0) & (denominator > 0)
    return np.divide(numerator, denominator, out=np.ones_like(numerator), where=is_positive)


def clip_factor(
    grad: Array, max_norm: float | None, slots: Sequence[TensorSlot], gather_rows: GatherRows
) -> float:
    """Return the factor that reduces the gradient's norm to `max_norm`; 1 for a smaller norm.

    `grad` is not written. Source: Pascanu, Mikolov and Bengio (2013), algorithm 1.
    """
    if max_norm is None:
        return 1.0
    # By pieces, since a block of an arena that holds some slots of a model has other elements.
    _, ranges = piece_ranges(grad.size, slots)
    norm = math.sqrt(gather_rows(sum_squares_by_piece([grad], ranges)).sum())
    return max_norm / norm if norm > max_norm else 1.0


def is_vector(slot: TensorSlot) -> bool:
    """Return whether a tensor has at most one dim, like biases and the weights of norms."""
    return len(slot.shape) < 2


@lru_cache(maxsize=16)
def find_decaying(size: int, slots: tuple[TensorSlot, ...]) -> Sequence[Sequence[slice]]:
    """Return, per block, the slices of the block to which weight decay applies, but for vectors."""
    decaying_parts: list[list[slice]] = [[] for _ in range(0, size, BLOCK_ELEMENTS)]
    for i, elements in pieces(size, slots):
        if not is_vector(slots[i]):
            block, start = divmod(elements.start, BLOCK_ELEMENTS)
            decaying_parts[block].append(slice(start, elements.stop - block * BLOCK_ELEMENTS))
    return decaying_parts


def slot_pieces(size: int, slots: Sequence[TensorSlot]) -> Iterator[BlockPiece]:
    """Yield the piece of each slot that lies in a shard of `size` elements."""
    for i, slot in enumerate(slots):
        start, stop = max(slot.offset, 0), min(slot.offset + slot.size, size)
        if start < stop:
            yield BlockPiece(i, slice(start, stop))


THREADS = 256
#: One block of threads per piece: each thread adds every 256th square, then a tree adds the sums of
#: the threads. The order depends only on the length of the piece.
SQUARES_KERNEL = """
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


def _sum_squares_on_device(arrays: Sequence[Array], ranges: np.ndarray) -> np.ndarray:
    """Do the work of `sum_squares_by_piece` with one kernel per array and one small copy."""
    x, xp = arrays[0], namespace(arrays[0])
    sums = xp.zeros((len(arrays), len(ranges)), np.float64)
    if len(ranges):
        starts, stops = xp.asarray(ranges.T.copy())
        c_type = {"float32": "float", "float64": "double"}[x.dtype.name]
        source = SQUARES_KERNEL.replace("REAL", c_type)
        kernel = raw_kernel(x, source, "squares")
        for array, piece_sums in zip(arrays, sums, strict=True):
            kernel((len(ranges),), (THREADS,), (array, starts, stops, piece_sums))
    return np.ascontiguousarray(to_host(sums).T)


def _blocks_of(slot: TensorSlot) -> range:
    first = slot.offset // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    return range(first, slot.offset + slot.size, BLOCK_ELEMENTS)
