"""Integers as floating-point numbers, exactly, in the planes of an arena.

Integers of at most 16 bits are such numbers. Others are four, of 16 bits each, from the lowest on:

    2^40 + 7    7    0    256    0        the last one has the sign

A mean of equal numbers is exact. The code is linear: unequal numbers get about their mean.
"""

from __future__ import annotations

import numpy as np

CHUNKS, CHUNK_BITS = 4, 16  #: checkpoint/about.py, which lies below, knows the first
ROUNDING = 2.0**-10  #: a smaller fraction of a chunk comes from the mean of equal ones


def is_wide(dtype: np.typing.DTypeLike) -> bool:
    """Return whether an integer of `dtype` needs several numbers."""
    return np.dtype(dtype).itemsize * 8 > CHUNK_BITS


def coded_shape(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> tuple[int, ...]:
    """Return the shape of the code of an array."""
    return (*shape, CHUNKS) if is_wide(dtype) else shape


def decoded_shape(shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> tuple[int, ...]:
    """Return the shape of the integers that a code of `shape` stands for."""
    return shape[:-1] if is_wide(dtype) else shape


def encode(x: np.ndarray) -> np.ndarray:
    """Return the code of integers or booleans `x`, float64."""
    if not is_wide(x.dtype):
        return x.astype(np.float64)
    shifts = CHUNK_BITS * np.arange(CHUNKS)
    chunks = x.astype(np.int64)[..., None] >> shifts
    chunks[..., :-1] &= (1 << CHUNK_BITS) - 1
    return chunks.astype(np.float64)


def decode(code: np.ndarray, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Return the integers of `dtype` that `code`, or a mean of codes, stands for."""
    float_code = code.astype(np.float64)
    rounded_code = np.rint(float_code)
    if not is_wide(dtype):
        return np.asarray(rounded_code).astype(dtype)
    fractions = float_code - rounded_code
    fractions[abs(fractions) < ROUNDING] = 0
    shifts = CHUNK_BITS * np.arange(CHUNKS)
    remainder = np.rint((fractions * 2.0**shifts).sum(-1)).astype(np.int64)
    return np.asarray((rounded_code.astype(np.int64) << shifts).sum(-1) + remainder).astype(dtype)
