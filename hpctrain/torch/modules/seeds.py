"""Seeds of PyTorch's generator."""

from __future__ import annotations

import numpy as np
import torch


def seed_generator(*numbers: int) -> None:
    """Seed PyTorch's generator by a few integers from 0 on.

    PyTorch's generator for CPUs takes 32 bits of a seed, so the numbers are hashed.
    """
    torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))
