"""Seeds of PyTorch's generator."""

from __future__ import annotations

import numpy as np

_WORD = (1 << 64) - 1
#: Of SplitMix64 (Steele, Lea and Flood, 2014)
GOLDEN, FINALIZER = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def hash_numbers(*numbers: int) -> int:
    """Return a hash, of 32 bits, of a few integers from 0 on.

    PyTorch's generator for CPUs takes 32 bits of a seed. By the finalizer of SplitMix64.
    """
    x = 0
    for number in numbers:
        x = (x + number + 1) * GOLDEN & _WORD
        for shift, factor in FINALIZER:
            x = (x ^ (x >> shift)) * factor & _WORD
    return x >> 32


def hash_indexes(epoch: int, indexes: np.ndarray) -> list[int]:
    """Return a hash of 32 bits of (epoch, index) for each of `indexes`, int64 (n,).

    In some nanoseconds per index.
    """
    x = indexes.astype(np.uint64) + np.uint64((epoch + 1) * GOLDEN & _WORD)
    for shift, factor in FINALIZER:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x >> np.uint64(32)).tolist()
