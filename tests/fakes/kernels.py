"""What the CUDA sources of the product do, told in Python: each is checked by a test of its own."""

from __future__ import annotations

from functools import partial

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


def combine(ufunc, count, outs, grid, block, *args) -> None:
    """Combine arrays in their order, each time rounded to their dtype, into all outs."""
    *arrays, n, packs = args
    ys, (total, *others) = arrays[:outs], arrays[outs:]
    assert len(others) == count - 1 and all(len(x) == n for x in arrays)
    assert packs in (0, total.nbytes // 16) and grid[0] * block[0] > 0
    wide = np.float32 if total.itemsize == 2 else total.dtype
    total = total.copy()
    for other in others:
        total = ufunc(total.astype(wide), other.astype(wide)).astype(total.dtype)
    for y in ys:
        y[...] = total


def dropout(grid, block, y, x, factor, limit, rows, features, *words) -> None:
    """Draw the mask of NumPy's own Philox, whose counter and key are `words`, and multiply."""
    assert x.shape == y.shape and x.size == rows * features and grid[0] * block[0] > 0
    stream = np.random.Philox(counter=np.array(words[:4]), key=np.array(words[4:6]))
    blocks = -(-int(features) // 8)
    draws = stream.random_raw(int(rows) * blocks * 4).view(np.uint32).reshape(int(rows), -1)
    kept = (draws[:, : int(features)] >= limit).reshape(x.shape)
    y[...] = (x.astype(factor.dtype) * (kept * factor)).astype(x.dtype)


COMBINED = {
    f"{ufunc.__name__}_{count}_into_{outs}": partial(combine, ufunc, count, outs)
    for ufunc in (np.add, np.minimum, np.maximum, np.bitwise_or)
    for count in range(2, 10)
    for outs in range(1, 10)
}
KERNELS = {"squares": squares, "dropout": dropout, **COMBINED}
