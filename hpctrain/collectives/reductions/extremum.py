"""Minimum and maximum of floats by integer keys: the same bits in any order, on any MPI or device.

As in IEEE 754-2019, -0 is less than +0 and a NaN is the result wherever it occurs. NumPy, CUDA and
MPI libraries disagree on both, some by the place of an element in its array. The bits of a float,
read as an integer, need two steps to be in this order. In 32 bits:

    bits        80000000 .. FF800000 .. FFFFFFFF | 00000000 .. 7F800000 .. 7FFFFFFF
    float       -0          -inf        NaN      | +0          +inf        NaN

    invert all negative ones, bits ^ 7FFFFFFF; now the integers ascend as the floats do:

                NaN .. | -inf ........ -0 | +0 ........ +inf | .. NaN

    rotate by the 7FFFFF NaNs of one side, so that all lie at the end that wins:

    maximum     -inf ........ -0 | +0 ........ +inf | NaN ....
    minimum     .... NaN | -inf ........ -0 | +0 ........ +inf

Both steps can be undone, so no bit is lost. Of several NaNs the order of keys selects one: the
result depends neither on the order of operands nor on the algorithm.
Source: IEEE 754-2019, 9.6 (minimum, maximum) and 5.10 (total order).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hpctrain.collectives.reductions import cuda_sum
from hpctrain.core.xp import Array, on_device

TILE = 16_384  # elements whose keys are held at once: they stay in the cache


@dataclass(frozen=True)
class Extremum:
    """Minimum or maximum of flat arrays of one float dtype; called as NumPy's ufuncs are."""

    ufunc: np.ufunc  #: np.minimum or np.maximum
    integer: np.dtype  #: signed, as wide as the floats
    rotation: np.generic  #: added to a float's turned bits

    def __call__(self, a: Array, b: Array, out: Array) -> Array:
        """Write the minima or maxima of `a` and `b` into `out`, which may be one of them."""
        if on_device(out):
            cuda_sum.combine([a, b], self.ufunc, [out])
            return out
        a, b, result = (x.view(self.integer) for x in (a, b, out))
        for part in _tiles(a):
            keys = self._keys(a[part])
            self.ufunc(keys, self._keys(b[part]), out=keys)
            result[part] = self._bits(keys)
        return out

    def encode(self, x: Array) -> Array:
        """Replace flat `x` by its keys, and return them: the integers in the same memory."""
        keys = x.view(self.integer)
        for part in _tiles(keys):
            keys[part] = self._keys(keys[part])
        return keys

    def decode(self, keys: Array) -> None:
        """Replace `keys` by the floats that they stand for."""
        for part in _tiles(keys):
            keys[part] = self._bits(keys[part])

    def _keys(self, bits: Array) -> Array:
        keys = _turned(bits)
        keys += self.rotation
        return keys

    def _bits(self, keys: Array) -> Array:
        return _turned(keys - self.rotation)


@lru_cache
def extremum(ufunc: np.ufunc, dtype: np.dtype) -> Extremum:
    """Return `ufunc`, np.minimum or np.maximum, for floats of `dtype`."""
    integer = np.dtype(f"i{dtype.itemsize}")
    nans = (1 << cuda_sum.FRACTION_BITS[dtype.name]) - 1
    return Extremum(ufunc, integer, integer.type(nans if ufunc is np.minimum else -nans))


def _turned(bits: Array) -> Array:
    """Return new integers: `bits` with those of negative ones inverted, but for the sign."""
    sign_mask = bits >> (8 * bits.itemsize - 1)
    sign_mask &= np.iinfo(bits.dtype).max
    sign_mask ^= bits
    return sign_mask


def _tiles(x: Array) -> Iterator[slice]:
    step = max(x.size, 1) if on_device(x) else TILE
    for start in range(0, x.size, step):
        yield slice(start, start + step)
