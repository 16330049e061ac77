"""Mean: the sum over all ranks, divided by their number; finite wherever the exact mean is.

A sum of P finite numbers may overflow although their mean does not: twice 40,000 in float16.
Numbers scaled by 2^-k, 2^k >= 2P, cannot overflow, but small ones would lose digits. So ranks vote
whether any rank has a number large enough for an overflow, and only then compute two sums:

    x         sum of x         divided by P                    used where this sum is finite
    x 2^-k    sum of x 2^-k    divided by P 2^-k, exactly      used elsewhere

Beyond the sum it costs one more pass over x and one vote (vote.py); after a positive vote, also a
second sum and a copy of x.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import TILE_ELEMENTS, Operation
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.core.xp import Array, namespace, on_device, to_host, widened

#: Sums in place, and returns this rank's part of the sum; None if every rank has the whole sum.
SumFunction = Callable[[Group, Array, Operation], Array | None]
BFLOAT16_MAX = 2.0**128 - 2.0**120  # absent from NumPy's finfo


def mean(group: Group, x: Array, op: Operation, reduce: SumFunction) -> None:
    """Reduce flat `x`, float or complex, by `reduce`, and divide this rank's part of the sum.

    Collective. `op` must be an addition.
    """
    ranks, exponent = group.link.size, -group.link.size.bit_length() - 1
    if ranks == 1 or x.size == 0:
        return
    if not elementwise_maximum(group, (int(_may_overflow(x, ranks)), 0))[0]:
        _divide(_sum_as_real(group, x, op, reduce), ranks)
        return
    scaled = (_view_as_real(x) * _view_as_real(x).dtype.type(2.0**exponent)).view(x.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        total = _sum_as_real(group, x, op, reduce)
        fallback = _clipped_quotients(
            _sum_as_real(group, scaled, op, reduce), ranks * 2.0**exponent
        )
        is_finite = namespace(x).isfinite(total)
        _divide(total, ranks)
        total[...] = namespace(x).where(is_finite, total, fallback)


def _sum_as_real(group: Group, x: Array, op: Operation, reduce: SumFunction) -> Array:
    """Return this rank's part of the sum by `reduce`; complex numbers as pairs of real numbers."""
    total = reduce(group, x, op)
    return _view_as_real(x if total is None else total)


def _view_as_real(x: Array) -> Array:
    """Return a view of flat `x` in which complex numbers are pairs of real numbers."""
    return x.view(f"f{x.itemsize // 2}") if x.dtype.kind == "c" else x


def _may_overflow(x: Array, ranks: int) -> bool:
    """Return whether a sum over `ranks` of numbers as large as in `x` may overflow."""
    real_numbers = _view_as_real(x)
    extremes = to_host(namespace(x).stack([real_numbers.min(), real_numbers.max()])).astype(
        np.float64
    )
    return not abs(extremes).max() < _max_finite(x.dtype) / (2 * ranks)


def _max_finite(dtype: np.dtype) -> float:
    """Return the largest finite number of `dtype`, or of the parts of a complex dtype."""
    return BFLOAT16_MAX if dtype.name == "bfloat16" else float(np.finfo(dtype).max)


def _divide(total: Array, ranks: int) -> None:
    """Divide real `total` in place; 16-bit floats in float32."""
    tile_length = total.size if on_device(total) else TILE_ELEMENTS
    for start in range(0, total.size, tile_length):
        part = total[start : start + tile_length]
        part[...] = widened(part) / ranks


def _clipped_quotients(total: Array, divisor: float) -> Array:
    """Return finite real `total` / `divisor`, clipped at the largest number after rounding."""
    limit, wide_total = _max_finite(total.dtype), widened(total)
    xp = namespace(total)
    quotients = xp.clip(wide_total / divisor, -limit, limit)
    return xp.where(xp.isfinite(total), quotients, wide_total).astype(total.dtype)
