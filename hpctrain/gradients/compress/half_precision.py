"""16-bit floats on the wire: half the bytes of float32.

A bucket is rounded to 16 bits, summed by any algorithm of hpctrain and converted back. Each hop
adds in float32 and rounds once; the rounded sum is then only copied, so all ranks end with the same
bytes. With P ranks a sum is rounded P times in a ring, and log2 P times in a tree. For unit
roundoff u (2^-8 for bfloat16, 2^-11 for float16) and rounding to nearest,

    |sum - exact| <= P u (1 + u)^P (|g_1| + ... + |g_P|)

bfloat16 has the range of float32. float16 ends at 65,504 and loses digits below 2^-14, so small
gradients would become 0. Therefore all ranks agree on the largest magnitude m of a bucket, with a
message of 8 bytes, and send 2^e times the gradient, where 2^e P m < 2^15: no sum can overflow, and
2^-39 of the largest is still represented. Multiplying by a power of two is exact. Source of the
scaling: Micikevicius et al., "Mixed precision training", 2018, who use one scale for all tensors.

Like the gradient, the 16-bit plane is shared with the neighbours of a node. On a GPU two further
kernels per bucket compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp, isfinite

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.reductions.bfloat16 import round_to_bfloat16, widen_bfloat16
from hpctrain.collectives.reductions.operations import float32_ufunc
from hpctrain.core.xp import Array, namespace, to_host
from hpctrain.gradients.arena import Arena, view_offset

MAX_SUM_EXPONENT = 15  #: scaled sums stay below 2 to this power
MAX_SCALE_EXPONENT = 100  #: the scale is at most 2 to this power


class _HalfPrecision:
    """Has a plane of 16-bit elements, which the wire sees in place of the gradients."""

    def __init__(
        self, allreduce: AllReduceFunction, arena: Arena, zeros_like: Callable[[Array], Array]
    ):
        """Sum slices of `arena.grad`; `zeros_like` gives the memory that the wire sees."""
        self.local_state: dict[str, Array] = {}
        self.shared_state: dict[str, Array] = {}
        self._allreduce, self._grad = allreduce, arena.grad
        self._plane = zeros_like(namespace(arena.grad).empty(arena.grad.size, self._dtype()))

    def _dtype(self) -> np.dtype:
        return np.dtype(np.float16)

    def _view_bucket(self, x: Array) -> Array:
        """Return the 16-bit elements of bucket `x`."""
        start = view_offset(self._grad, x)
        return self._plane[start : start + x.size]


class Bfloat16(_HalfPrecision):
    """Sums in bfloat16."""

    def __call__(self, group: Group, x: Array) -> None:
        """Sum flat `x` in place."""
        rounded_bucket = self._view_bucket(x)
        round_to_bfloat16(x, rounded_bucket)
        self._allreduce(group, rounded_bucket, float32_ufunc(np.add))
        widen_bfloat16(rounded_bucket, x)

    def _dtype(self) -> np.dtype:
        from ml_dtypes import bfloat16  # late: few runs need it

        return np.dtype(bfloat16)


class Float16(_HalfPrecision):
    """Sums in float16, scaled by a power of two."""

    def __call__(self, group: Group, x: Array) -> None:
        """Sum flat `x` in place; where a gradient is not finite, its first element is NaN."""
        scale = _choose_scale(_find_max_magnitude(group, x), group.link.size)
        if scale is None:  # on all ranks, since they agree on the magnitude
            x[:1] = np.nan  # one element is enough, and gaps between slots stay zero
            return
        rounded_bucket, xp = self._view_bucket(x), namespace(x)
        xp.multiply(x, scale, out=rounded_bucket)
        self._allreduce(group, rounded_bucket, float32_ufunc(np.add))
        xp.multiply(rounded_bucket, 1 / scale, out=x, dtype=x.dtype)


def _find_max_magnitude(group: Group, x: Array) -> float:
    """Return the largest magnitude in `x` over all ranks, NaN if any element is NaN.

    On a device, two numbers are copied to the host, which waits for them.
    """
    extremes = to_host(namespace(x).stack([x.min(), x.max()])) if x.size else np.zeros(1)
    # Python's max would ignore NaN.
    magnitude = abs(extremes).max(keepdims=True).astype(np.float64)
    recursive_doubling(group, magnitude, np.maximum)
    return float(magnitude[0])


def _choose_scale(max_magnitude: float, ranks: int) -> float | None:
    """Return the power of two for the scale; None if `max_magnitude` is not finite."""
    if not isfinite(max_magnitude):
        return None
    if not max_magnitude:
        return 1.0
    _, exponent = frexp(ranks * max_magnitude)  # ranks * max_magnitude < 2 ** exponent
    return float(2.0 ** min(MAX_SUM_EXPONENT - exponent, MAX_SCALE_EXPONENT))
