"""Random data of which the right result is known in float64, whatever the length.

Each rank has a block of a prime number of random values, repeated to the length of the vector: so
a chunk that lands in the wrong place is seen, and no rank needs the vectors of the others.

    rank 0   [ a a' a'' ... ][ a a' a'' ... ][ a a'       the sum of the blocks, in float64, is
    rank 1   [ b b' b'' ... ][ b b' b'' ... ][ b b'       the block of the sum
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpctrain.collectives import OPERATIONS
from hpctrain.collectives.chunks import bounds

PERIOD = 65_537  # a prime: no chunk's place is a multiple of it
BFLOAT16_EPS = 2.0**-7  # NumPy's finfo does not know it


def block(rank: int, dtype: np.dtype) -> np.ndarray:
    """Return the random values of `rank`: (PERIOD,) of `dtype`."""
    rng = np.random.default_rng((rank, 2026))
    if dtype.kind == "i":
        return rng.integers(-1000, 1000, PERIOD).astype(dtype)
    return rng.standard_normal(PERIOD).astype(dtype)


def fill(x: np.ndarray, values: np.ndarray, start: int = 0) -> None:
    """Write block `values` into flat `x`, which begins at element `start` of the vector."""
    for here, there in _places(start, x.size):
        x[here] = values[there]


def agrees(x: np.ndarray, wanted: np.ndarray, margin: np.ndarray, start: int = 0) -> bool:
    """Return whether each element of `x` lies within `margin` of `wanted`, blocks of float64."""
    return all(
        bool(np.all(np.abs(x[here].astype(np.float64) - wanted[there]) <= margin[there]))
        for here, there in _places(start, x.size)
    )


def reduced(op: str, ranks: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the block of the reduction over `ranks` and its margin, both float64.

    A sum of P values has at most P - 1 roundings on the way of each value, in any order: an error
    of (P - 1) u sum|v| (Higham 2002, section 4.2), here with the whole spacing for u, for slack.
    """
    values = [block(rank, dtype).astype(np.float64) for rank in range(ranks)]
    wanted = OPERATIONS[op].reduce(values)
    exact = op != "sum" or dtype.kind == "i"
    margin = np.zeros(PERIOD) if exact else ranks * eps(dtype) * np.sum(np.abs(values), axis=0)
    return wanted, margin


def eps(dtype: np.dtype) -> float:
    """Return the spacing of floats of `dtype` at 1."""
    return BFLOAT16_EPS if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def gathered(ranks: int, length: int, dtype: np.dtype) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (start, stop, block) of each rank's chunk of `length` elements."""
    edges = bounds(length, ranks)
    for rank in range(ranks):
        yield edges[rank], edges[rank + 1], block(rank, dtype)


def _places(start: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield (where in the array, where in the block) for elements `start` .. of the vector."""
    at = 0
    while at < length:
        phase = (start + at) % PERIOD
        step = min(PERIOD - phase, length - at)
        yield slice(at, at + step), slice(phase, phase + step)
        at += step
