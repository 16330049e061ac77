"""16-bit floats on the wire: half the bytes of float32.

A bucket is rounded to 16 bits, summed by any of our algorithms and widened again. Each hop adds in
float32 and rounds once; the owner of a sum keeps the rounded value, which is then only copied, so
all ranks end with the same bytes. With P ranks a sum is rounded P times along the way of a ring,
log2 P times in a tree: for unit roundoff u (2^-8 for bfloat16, 2^-11 for float16) and rounding to
nearest,

    |sum - exact| <= P u (1 + u)^P (|g_1| + ... + |g_P|)

bfloat16 has the range of float32. float16 ends at 65,504 and, below 2^-14, loses digits: gradients
are small and would vanish. So all ranks agree on the largest magnitude m of a bucket, by a message
of 8 bytes, and send 2^e times the gradient, where 2^e P m < 2^15: even the sum of the largest
cannot overflow, and 2^-39 of it is still represented. A power of two costs no digits. Source of the
scaling: Micikevicius et al., "Mixed precision training", 2018, who use one scale for all.

The 16-bit plane is shared with the neighbours of a node, as the gradient is. On a GPU the bits are
the same: two kernels per bucket beside those of the all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp, isfinite

import numpy as np

from hpctrain.collectives import AllReduceFunction, Group
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.reductions import bfloat16 as bf16
from hpctrain.collectives.reductions.operations import in_float32
from hpctrain.core.xp import Array, namespace, to_host
from hpctrain.gradients.arena import Arena, offset_in

LARGEST = 15  #: a sum of float16 stays below two to this power
EXPONENT = 100  #: no gradient is multiplied by more than two to this power


class _HalfPlane:
    """The plane in which the buckets of an arena are sent: 16 bits for each element."""

    def __init__(self, arena: Arena, dtype: type, zeros_like: Callable[[Array], Array]):
        self._grad = arena.grad
        self._plane = zeros_like(namespace(arena.grad).empty(arena.grad.size, dtype))

    def of(self, x: Array) -> Array:
        """Return the 16-bit elements of bucket `x`."""
        start = offset_in(self._grad, x)
        return self._plane[start : start + x.size]


class Bfloat16:
    """Sums in bfloat16."""

    def __init__(
        self, allreduce: AllReduceFunction, arena: Arena, zeros_like: Callable[[Array], Array]
    ):
        """Sum slices of `arena.grad`; `zeros_like` gives the memory that the wire sees."""
        self.own: dict[str, Array] = {}
        self.shared: dict[str, Array] = {}
        self._allreduce, self._small = allreduce, _HalfPlane(arena, np.uint16, zeros_like)

    def __call__(self, group: Group, x: Array) -> None:
        """Sum flat `x` in place."""
        small = self._small.of(x)
        bf16.round_to_bfloat16(x, small)
        self._allreduce(group, small, bf16.add)
        bf16.widen(small, x)


class Float16:
    """Sums in float16, scaled by a power of two."""

    def __init__(
        self, allreduce: AllReduceFunction, arena: Arena, zeros_like: Callable[[Array], Array]
    ):
        """Sum slices of `arena.grad`; `zeros_like` gives the memory that the wire sees."""
        self.own: dict[str, Array] = {}
        self.shared: dict[str, Array] = {}
        self._allreduce, self._small = allreduce, _HalfPlane(arena, np.float16, zeros_like)
        self._add = in_float32(np.add)

    def __call__(self, group: Group, x: Array) -> None:
        """Sum flat `x` in place; where a gradient is not finite, its first element is NaN."""
        scale = _scale(_largest(group, x), group.link.size)
        if scale is None:
            x[:1] = np.nan  # on all ranks: they agree on the largest; gaps between slots stay zero
            return
        small, xp = self._small.of(x), namespace(x)
        xp.multiply(x, scale, out=small)
        self._allreduce(group, small, self._add)
        xp.multiply(small, 1 / scale, out=x, dtype=x.dtype)


def _largest(group: Group, x: Array) -> float:
    """Return the largest magnitude over all ranks, NaN if there is one.

    From a device two numbers come to the host, which waits for them.
    """
    ends = to_host(namespace(x).stack([x.min(), x.max()])) if x.size else np.zeros(1)
    peak = abs(ends).max(keepdims=True).astype(np.float64)  # not Python's max, which may pass NaN
    recursive_doubling(group, peak, np.maximum)
    return float(peak[0])


def _scale(largest: float, ranks: int) -> float | None:
    """Return the power of two by which to multiply; None if `largest` is not finite."""
    if not isfinite(largest):
        return None
    _, exponent = frexp(ranks * largest)  # ranks * largest < 2 ** exponent
    return float(2.0 ** min(LARGEST - exponent, EXPONENT)) if largest else 1.0
