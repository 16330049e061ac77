"""Python versions of hpctrain's CUDA kernels; each kernel has a test of its own."""

from __future__ import annotations

import re
from functools import partial

import ml_dtypes
import numpy as np

from hpctrain.collectives.reductions.operations import operation, operation_names, ufunc_of
from hpctrain.nn.cuda import batch_norm


def squares(grid, block, x, starts, stops, sums) -> None:
    """Add squares as the threads of a block do: each its own, then in a tree."""
    (threads,) = block
    for piece in range(grid[0]):
        part = np.zeros(threads)
        values = x[starts[piece] : stops[piece]].astype(np.float64)
        for i in range(0, len(values), threads):
            subset = values[i : i + threads]
            part[: len(subset)] += subset * subset
        while len(part) > 1:
            part = part[: len(part) // 2] + part[len(part) // 2 :]
        sums[piece] = part[0]


def combine(ufunc, count, outs, grid, block, *args) -> None:
    """Combine arrays in their order, each time rounded to their dtype, into all outs."""
    *arrays, n, packs = args
    ys, (total, *rest) = arrays[:outs], arrays[outs:]
    assert len(rest) == count - 1 and all(len(x) == n for x in arrays)
    assert packs in (0, total.nbytes // 16) and grid[0] * block[0] > 0
    of_dtype = [operation(name, total.dtype) for name in operation_names(total.dtype)]
    op = next(op for op in of_dtype if ufunc_of(op) is ufunc)
    total = total.copy()
    for other in rest:
        op(total, other, out=total)
    for y in ys:
        y[...] = total


def dropout(grid, block, y, x, factor, limit, rows, features, *words) -> None:
    """Draw the mask of NumPy's own Philox, whose counter and key are `words`, and multiply."""
    assert x.shape == y.shape and x.size == rows * features and grid[0] * block[0] > 0
    stream = np.random.Philox(counter=np.array(words[:4]), key=np.array(words[4:6]))
    blocks = -(-int(features) // 8)
    draws = stream.random_raw(int(rows) * blocks * 4).view(np.uint32).reshape(int(rows), -1)
    saved = (draws[:, : int(features)] >= limit).reshape(x.shape)
    y[...] = (x.astype(factor.dtype) * (saved * factor)).astype(x.dtype)


def to_bfloat16(grid, block, y, x, n) -> None:
    assert x.size == y.size == n and y.dtype == ml_dtypes.bfloat16
    y[...] = x.astype(np.float32)


def from_bfloat16(grid, block, y, x, n) -> None:
    assert x.size == y.size == n and x.dtype == ml_dtypes.bfloat16
    y[...] = x


def first_not_finite(grid, block, x, n, limit, start, first) -> None:
    """Keep the place of the first element above `limit`, and whether it is finite."""
    assert x.size == n
    bad = np.flatnonzero(~(abs(x) <= limit))
    for i in bad[:1]:
        first[0] = min(int(first[0]), 2 * (int(start) + int(i)) + int(np.isfinite(x[i])))


def add_to_residual(grid, block, residual, x, matrices, bucket) -> None:
    assert grid[1] == len(matrices)
    for start, size, *_ in matrices:
        residual[start : start + size] += x[start - bucket : start - bucket + size]


def take_largest(grid, block, residual, matrices, founds, location, values, bucket) -> None:
    """Take the largest, of equal ones the first; what was counted before need not be known."""
    for start, size, k, first in matrices:
        own = residual[start : start + size]
        bits = abs(own).view(f"u{own.itemsize}")  # in their order, not-a-number the largest
        largest = np.argsort(~bits, kind="stable")[:k]
        location[first : first + k] = start - bucket + largest
        values[first : first + k] = own[largest]
        own[largest] = 0


def add_pairs(grid, block, x, location, values, n) -> None:
    assert len(location) == len(values) == n == len(np.unique(location))
    x[location] += values


def orthonormal(grid, block, x, starts, rows, factors, rank) -> None:
    for start, n in zip(starts, rows, strict=True):
        a = x[start : start + n * rank].reshape(n, rank)
        a[...] = np.linalg.qr(a)[0]


def _windows(x, kernel, stride, oh, ow):
    """Return the view (n, oh, ow, kernel, kernel, c) of the windows of padded images."""
    a, b, d, e = x.strides
    strides = (a, b * stride, d * stride, b, d, e)
    shape = (len(x), oh, ow, kernel, kernel, x.shape[3])
    return np.lib.stride_tricks.as_strided(x, shape, strides)


def columns(grid, block, out, x, h, w, channels, oh, ow, kernel, stride, padding, count) -> None:
    assert out.size % count == 0 and x.shape[1:3] == (h, w) and x.shape[3] % channels == 0
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    out[...] = _windows(padded, kernel, stride, oh, ow).reshape(out.shape)


def image(grid, block, dx, rows, h, w, channels, oh, ow, kernel, stride, padding, count) -> None:
    assert dx.size % count == 0 and dx.shape[1:3] == (h, w) and dx.shape[3] % channels == 0
    n, _, _, c = dx.shape
    wide = np.float32 if dx.itemsize == 2 else dx.dtype
    padded = np.zeros((n, h + 2 * padding, w + 2 * padding, c), wide)
    rows = rows.reshape(n, oh, ow, kernel, kernel, c)
    for i, j in np.ndindex(int(kernel), int(kernel)):
        _windows(padded, kernel, stride, oh, ow)[:, :, :, i, j] += rows[:, :, :, i, j]
    dx[...] = padded[:, padding : padding + h, padding : padding + w]


def sums_of_values(grid, block, part, x, rows, c) -> None:
    assert x.shape == (rows, c) and part.shape == (grid[0], 2, c)
    d = x.astype(np.float64) - x[0].astype(np.float64)
    part[...] = 0
    part[0] = d.sum(axis=0), (d * d).sum(axis=0)


def _normal(x, mean, scale):
    maximum = mean.astype(scale.dtype)
    return (x.astype(scale.dtype) - maximum - (mean - maximum).astype(scale.dtype)) * scale


def sums_of_gradients(grid, block, part, x, dy, mean, scale, rows, c) -> None:
    assert x.shape == dy.shape == (rows, c) and part.shape == (grid[0], 2, c)
    d = dy.astype(np.float64)
    part[...] = 0
    part[0] = d.sum(axis=0), (d * _normal(x, mean, scale)).sum(axis=0)


def totals_of_values(grid, block, total, part, parts, x, rows, c) -> None:
    assert grid[0] * batch_norm.TOTAL_CHANNELS >= c and len(part) == parts
    (a, b), x0 = part.sum(axis=0), x[0].astype(np.float64)
    total[:c], total[c:] = rows * x0 + a, b + 2 * x0 * a + rows * x0 * x0


def totals_of_gradients(grid, block, total, part, parts, bias, weight, c) -> None:
    assert grid[0] * batch_norm.TOTAL_CHANNELS >= c and len(part) == parts
    bias[...], weight[...] = total[:c], total[c:] = part.sum(axis=0)


def statistics(grid, block, mean, scale, running_mean, running_variance, total, *numbers) -> None:
    rows, momentum, epsilon, note, c = numbers
    mean[...] = total[:c] / max(rows, 1)
    variance = np.maximum(total[c:] / max(rows, 1) - mean * mean, 0)
    scale[...] = 1 / np.sqrt(variance + epsilon)
    unbiased = variance * (rows / max(rows - 1, 1))
    for buffer, new in ((running_mean, mean), (running_variance, unbiased)):
        if note:
            buffer *= buffer.dtype.type(1 - momentum)
            buffer += (momentum * new).astype(buffer.dtype)


def normalize(grid, block, y, x, mean, scale, weight, bias, count, c) -> None:
    assert x.size == y.size == count
    y[...] = (_normal(x, mean, scale) * weight + bias).astype(y.dtype)


def back(grid, block, dx, dy, x, mean, scale, weight, total, share, count, c) -> None:
    by_mean, by_variance = (total * share).astype(scale.dtype).reshape(2, c)
    d = dy.astype(scale.dtype) - _normal(x, mean, scale) * by_variance - by_mean
    dx[...] = (d * (scale * weight)).astype(dx.dtype)


def _rows_of(x, mean, scale):
    return (x.astype(scale.dtype) - mean[:, None]) * scale[:, None]


def normalize_rows(grid, block, y, mean, scale, x, weight, bias, epsilon, rows, c) -> None:
    assert x.shape == y.shape == (rows, c)
    wide = x.astype(np.float64)
    mean[...] = wide.mean(axis=1)
    scale[...] = 1 / np.sqrt(((wide - mean[:, None]) ** 2).mean(axis=1) + epsilon)
    y[...] = (_rows_of(x, mean, scale) * weight + bias).astype(y.dtype)


def back_of_rows(grid, block, dx, dy, x, mean, scale, weight, rows, c) -> None:
    d, normal = dy.astype(scale.dtype) * weight, _rows_of(x, mean, scale)
    along = (d * normal).astype(np.float64).mean(axis=1, keepdims=True).astype(d.dtype)
    level = d.astype(np.float64).mean(axis=1, keepdims=True).astype(d.dtype)
    dx[...] = ((d - level - normal * along) * scale[:, None]).astype(dx.dtype)


def sums_of_rows(grid, block, part, x, dy, mean, scale, rows, c) -> None:
    d = dy.astype(np.float64)
    part[...] = 0
    part[0] = d.sum(axis=0), (d * _rows_of(x, mean, scale)).sum(axis=0)


def entropies(grid, block, told, dz, z, labels, scale, expected, rows, c) -> None:
    assert z.shape == (rows, c) and labels.shape == (rows,) and labels.dtype == np.int64
    all_rows, wrong = np.arange(rows), (labels < 0) | (labels >= c)
    own = np.where(wrong, 0, labels)
    powers = z - z.max(axis=1, keepdims=True)
    minimum = powers[all_rows, own]
    np.exp(powers, out=powers)
    totals = powers.sum(axis=1)
    told[...] = np.log(totals) - minimum, z.argmax(axis=1) == labels, wrong
    if expected:
        powers *= (float(scale) / totals)[:, None]
        powers[all_rows, own] -= float(scale)
        dz[...] = powers


def softmax_rows(grid, block, scores, factor, rows, c) -> None:
    assert scores.shape == (rows, c) and rows % c == 0
    later = np.arange(c) > (np.arange(rows) % c)[:, None]
    powers = np.where(later, -np.inf, scores * scores.dtype.type(factor))
    powers = np.exp(powers - powers.max(axis=1, keepdims=True))
    totals = powers.sum(axis=1, keepdims=True, dtype=np.float64)
    scores[...] = np.where(later, 0, powers / totals)


def back_of_softmax(grid, block, gradient, weights, factor, rows, c) -> None:
    assert gradient.shape == weights.shape == (rows, c)
    a = weights.astype(gradient.dtype)
    level = (a.astype(np.float64) * gradient).sum(axis=1, keepdims=True)
    gradient[...] = (gradient - level.astype(a.dtype)) * a * a.dtype.type(factor)


def nothing(grid, block, *args) -> None:
    """What only another kernel has use for."""


UFUNCS = (np.add, np.multiply, np.minimum, np.maximum, np.bitwise_and, np.bitwise_or,
          np.bitwise_xor, np.logical_and, np.logical_or, np.logical_xor)  # fmt: skip
COMBINED = {
    f"{ufunc.__name__}_{count}_into_{outs}": partial(combine, ufunc, count, outs)
    for ufunc in UFUNCS
    for count in range(2, 10)
    for outs in range(1, 10)
}
KERNELS = {
    "squares": squares,
    "dropout": dropout,
    "to_bfloat16": to_bfloat16,
    "from_bfloat16": from_bfloat16,
    "first_not_finite": first_not_finite,
    "add_to_residual": add_to_residual,
    "count_digits": nothing,
    "pick_digit": nothing,
    "take_largest": take_largest,
    "add_pairs": add_pairs,
    "orthonormal": orthonormal,
    "sums_of_values": sums_of_values,
    "sums_of_gradients": sums_of_gradients,
    "totals_of_values": totals_of_values,
    "totals_of_gradients": totals_of_gradients,
    "statistics": statistics,
    "normalize": normalize,
    "back": back,
    "normalize_rows": normalize_rows,
    "back_of_rows": back_of_rows,
    "sums_of_rows": sums_of_rows,
    "entropies": entropies,
    "softmax_rows": softmax_rows,
    "back_of_softmax": back_of_softmax,
    "columns": columns,
    "image": image,
    **COMBINED,
}


def written(code: str, name: str) -> list[int]:
    """Return the numbers of the arguments that a kernel may write: pointers that are not const."""
    (parameters,) = re.findall(rf"void\s+{name}\(([^)]*)\)", code)
    words = enumerate(parameters.split(","))
    return [i for i, word in words if "*" in word and "const " not in word]
