"""Seeds of PyTorch's generator."""

from __future__ import annotations

import numpy as np
import torch

_WORD = (1 << 64) - 1
#: Of SplitMix64 (Steele, Lea and Flood, 2014)
GOLDEN, FINALIZER = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def seed_generator(*numbers: int) -> None:
    """Seed PyTorch's generators by a few integers from 0 on.

    Not by torch.manual_seed, which formats the stack where CUDA is not in use: 1 ms.
    """
    seed = hash_numbers(*numbers)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


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
