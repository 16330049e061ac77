"""Random test data with a known reduction, computed in float64 for floats, at any length.

Each rank has a block of a prime number of random values, repeated to the length of the vector: so
a chunk in the wrong place is detected, and no rank needs the vectors of the others.

    rank 0   [ a a' a'' ... ][ a a' a'' ... ][ a a'       the sum of the blocks, in float64, is
    rank 1   [ b b' b'' ... ][ b b' b'' ... ][ b b'       the block of the sum
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpctrain.collectives import operation
from hpctrain.collectives.chunks import bounds
from hpctrain.collectives.reductions.operations import ufunc_of

PERIOD = 65_537  # a prime: no chunk's place is a multiple of it
BFLOAT16_EPS = 2.0**-7  # absent from NumPy's finfo


def block(rank: int, dtype: np.dtype) -> np.ndarray:
    """Return the random values of `rank`: (PERIOD,) of `dtype`."""
    rng = np.random.default_rng((rank, 2026))
    if dtype.kind in "biu":
        return rng.integers(-1000, 1000, PERIOD).astype(dtype)
    parts = rng.standard_normal((2, PERIOD))
    return (parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)


def to_float64(values: np.ndarray) -> np.ndarray:
    """Return `values` in the dtype in which they are compared: int64, float64 or complex128."""
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def fill_pattern(x: np.ndarray, values: np.ndarray, start: int = 0) -> None:
    """Write block `values` into flat `x`, which begins at element `start` of the vector."""
    for in_array, in_block in _blocks_of(start, x.size):
        x[in_array] = values[in_block]


def agrees(x: np.ndarray, expected: np.ndarray, margin: np.ndarray, start: int = 0) -> bool:
    """Return whether each element of `x` lies within `margin` of `expected`, blocks in float64."""
    return all(
        bool(np.all(np.abs(to_float64(x[in_array]) - expected[in_block]) <= margin[in_block]))
        for in_array, in_block in _blocks_of(start, x.size)
    )


def reduced(op: str, ranks: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the reduction over `ranks` in the dtype of `to_float64`, and its margin in float64.

    A sum of P values has at most P - 1 roundings on the way of each value, in any order: an error
    of (P - 1) u sum|v| (Higham 2002, section 4.2), here with the whole spacing for u, for slack. So
    has a product, each of up to sqrt(5) u where numbers are complex (Brent et al., 2007).
    """
    values = [to_float64(block(rank, dtype)) for rank in range(ranks)]
    ufunc = ufunc_of(operation(op, dtype))
    expected = ufunc.reduce(values)
    if dtype.kind in "biu":  # what overflows wraps around
        return to_float64(expected.astype(dtype)), np.zeros(PERIOD)
    if op in ("min", "max"):
        return expected, np.zeros(PERIOD)
    factor = np.sqrt(5) if op == "prod" and dtype.kind == "c" else 1.0
    return expected, factor * ranks * eps(dtype) * ufunc.reduce(np.abs(values))


def eps(dtype: np.dtype) -> float:
    """Return the spacing of floats of `dtype` at 1."""
    return BFLOAT16_EPS if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def gathered(ranks: int, length: int, dtype: np.dtype) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (start, stop, block) of each rank's chunk of `length` elements."""
    edges = bounds(length, ranks)
    for rank in range(ranks):
        yield edges[rank], edges[rank + 1], block(rank, dtype)


def _blocks_of(start: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield (slice of the array, slice of the block) for elements `start` .. of the vector."""
    offset = 0
    while offset < length:
        phase = (start + offset) % PERIOD
        step = min(PERIOD - phase, length - offset)
        yield slice(offset, offset + step), slice(phase, phase + step)
        offset += step
