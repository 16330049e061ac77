"""What the CUDA sources of the product do, told in Python: each is checked by a test of its own."""

from __future__ import annotations

import numpy as np


def squares(grid, block, x, starts, stops, sums) -> None:
    """Add squares as the threads of a block do: each its own, then in a tree."""
    (threads,) = block
    for piece in range(grid[0]):
        part = np.zeros(threads)
        values = x[starts[piece] : stops[piece]].astype(np.float64)
        for i in range(0, len(values), threads):
            some = values[i : i + threads]
            part[: len(some)] += some * some
        while len(part) > 1:
            part = part[: len(part) // 2] + part[len(part) // 2 :]
        sums[piece] = part[0]


KERNELS = {"squares": squares}
