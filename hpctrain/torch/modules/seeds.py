"""Seeds of PyTorch's generator."""

from __future__ import annotations

import numpy as np
import torch

_WORD = (1 << 64) - 1


def seed_generator(*numbers: int) -> None:
    """Seed PyTorch's generators by a few integers from 0 on."""
    torch.manual_seed(hash_numbers(*numbers))


def hash_numbers(*numbers: int) -> int:
    """Return a hash of a few integers from 0 on.

    PyTorch's generator for CPUs takes 32 bits of a seed, so the numbers are hashed.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def hash_indexes(epoch: int, indexes: np.ndarray) -> list[int]:
    """Return a hash of 32 bits of (epoch, index) for each of `indexes`, int64 (n,).

    The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), in some nanoseconds per index.
    """
    x = indexes.astype(np.uint64) + np.uint64((epoch + 1) * 0x9E3779B97F4A7C15 & _WORD)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x >> np.uint64(32)).tolist()
