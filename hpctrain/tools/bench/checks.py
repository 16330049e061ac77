"""Random test data whose reduction is known at any length; float64 is the reference for floats.

Each rank repeats a block of random values up to the length of its vector. The block length is a
prime, so the check detects a misplaced chunk. No rank needs the vectors of the others.

    rank 0   [ a a' a'' ... ][ a a' a'' ... ][ a a'       the sum of the blocks, in float64, is
    rank 1   [ b b' b'' ... ][ b b' b'' ... ][ b b'       the block of the sum
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpctrain.collectives import operation
from hpctrain.collectives.reductions.operations import ufunc_of

BLOCK_LENGTH = 65_537  # a prime: chunks do not begin at multiples of it
BFLOAT16_EPS = 2.0**-7  # absent from NumPy's finfo


def random_block(rank: int, dtype: np.dtype) -> np.ndarray:
    """Return the block of `rank`: BLOCK_LENGTH random values of `dtype`."""
    rng = np.random.default_rng((rank, 2026))
    if dtype.kind in "biu":
        return rng.integers(-1000, 1000, BLOCK_LENGTH).astype(dtype)
    components = rng.standard_normal((2, BLOCK_LENGTH))
    return (components[0] + 1j * components[1] if dtype.kind == "c" else components[0]).astype(
        dtype
    )


def widen(values: np.ndarray) -> np.ndarray:
    """Convert `values` to the dtype of comparisons: int64, float64 or complex128."""
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def fill_with_block(x: np.ndarray, values: np.ndarray, start: int = 0) -> None:
    """Repeat block `values` in flat `x`, which begins at element `start` of the vector."""
    for array_slice, block_slice in _block_slices(start, x.size):
        x[array_slice] = values[block_slice]


def is_close(x: np.ndarray, expected: np.ndarray, margin: np.ndarray, start: int = 0) -> bool:
    """Return whether `x` lies within `margin` of `expected`; both are blocks from `widen`."""
    return all(
        bool(np.all(np.abs(widen(x[array_slice]) - expected[block_slice]) <= margin[block_slice]))
        for array_slice, block_slice in _block_slices(start, x.size)
    )


def expected_reduction(op: str, ranks: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the block of the reduction over `ranks`, and the error margin of each element.

    In a sum of P values, in any order, each value is rounded at most P - 1 times. The error is at
    most (P - 1) u sum|v| (Higham 2002, section 4.2); we use the full spacing for u as slack. The
    same holds for a product, with up to sqrt(5) u per complex factor (Brent et al., 2007).
    """
    values = [widen(random_block(rank, dtype)) for rank in range(ranks)]
    ufunc = ufunc_of(operation(op, dtype))
    expected = ufunc.reduce(values)
    if dtype.kind in "biu":  # integer overflow wraps around
        return widen(expected.astype(dtype)), np.zeros(BLOCK_LENGTH)
    if op in ("min", "max"):
        return expected, np.zeros(BLOCK_LENGTH)
    factor = np.sqrt(5) if op == "prod" and dtype.kind == "c" else 1.0
    return expected, factor * ranks * eps(dtype) * ufunc.reduce(np.abs(values))


def eps(dtype: np.dtype) -> float:
    """Return the machine epsilon of `dtype`: the spacing of floats at 1."""
    return BFLOAT16_EPS if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def _block_slices(start: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield (slice of the array, slice of the block) pairs that cover `length` elements."""
    offset = 0
    while offset < length:
        block_offset = (start + offset) % BLOCK_LENGTH
        length_in_block = min(BLOCK_LENGTH - block_offset, length - offset)
        yield (
            slice(offset, offset + length_in_block),
            slice(block_offset, block_offset + length_in_block),
        )
        offset += length_in_block
