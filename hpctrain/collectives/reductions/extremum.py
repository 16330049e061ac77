"""Minimum and maximum of floats by integer keys: the same bits in any order, on any MPI or device.

As in IEEE 754-2019, -0 is less than +0, and the result is NaN if an operand is NaN. NumPy, CUDA and
MPI libraries disagree on both rules; in some the result even depends on an element's index. Two
steps turn the bits of a float into an integer key of this order. In 32 bits:

    bits        80000000 .. FF800000 .. FFFFFFFF | 00000000 .. 7F800000 .. 7FFFFFFF
    float       -0          -inf        NaN      | +0          +inf        NaN

    invert the bits of negative floats, bits ^ 7FFFFFFF; now integers ascend as the floats do:

                NaN .. | -inf ........ -0 | +0 ........ +inf | .. NaN

    add the number of NaNs of one sign, 7FFFFF, so that all NaNs move to the end that wins:

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

TILE_ELEMENTS = 16_384  # elements processed at once: their keys stay in the cache


@dataclass(frozen=True)
class Extremum:
    """Minimum or maximum of flat arrays with the same float dtype; called like a NumPy ufunc."""

    ufunc: np.ufunc  #: np.minimum or np.maximum
    integer: np.dtype  #: signed, as wide as the floats
    rotation: np.generic  #: added to a float's bits after the inversion

    def __call__(self, a: Array, b: Array, out: Array) -> Array:
        """Write the minima or maxima of `a` and `b` into `out`, which may be `a` or `b`."""
        if on_device(out):
            cuda_sum.combine([a, b], self.ufunc, [out])
            return out
        a, b, result = (x.view(self.integer) for x in (a, b, out))
        for part in _tile_slices(a):
            keys = self._keys_from_bits(a[part])
            self.ufunc(keys, self._keys_from_bits(b[part]), out=keys)
            result[part] = self._bits_from_keys(keys)
        return out

    def encode(self, x: Array) -> Array:
        """Replace flat `x` by its keys, and return them: the integers in the same memory."""
        keys = x.view(self.integer)
        for part in _tile_slices(keys):
            keys[part] = self._keys_from_bits(keys[part])
        return keys

    def decode(self, keys: Array) -> None:
        """Replace `keys` by the floats that they stand for."""
        for part in _tile_slices(keys):
            keys[part] = self._bits_from_keys(keys[part])

    def _keys_from_bits(self, bits: Array) -> Array:
        keys = _invert_negatives(bits)
        keys += self.rotation
        return keys

    def _bits_from_keys(self, keys: Array) -> Array:
        return _invert_negatives(keys - self.rotation)


@lru_cache
def extremum(ufunc: np.ufunc, dtype: np.dtype) -> Extremum:
    """Return `ufunc`, np.minimum or np.maximum, for floats of `dtype`."""
    integer = np.dtype(f"i{dtype.itemsize}")
    max_nan_payload = (1 << cuda_sum.FRACTION_BITS[dtype.name]) - 1
    return Extremum(
        ufunc, integer, integer.type(max_nan_payload if ufunc is np.minimum else -max_nan_payload)
    )


def _invert_negatives(bits: Array) -> Array:
    """Return a copy of `bits`, where negative floats have all bits but the sign inverted."""
    inverted = bits >> (8 * bits.itemsize - 1)
    inverted &= np.iinfo(bits.dtype).max
    inverted ^= bits
    return inverted


def _tile_slices(x: Array) -> Iterator[slice]:
    tile_length = max(x.size, 1) if on_device(x) else TILE_ELEMENTS
    for start in range(0, x.size, tile_length):
        yield slice(start, start + tile_length)
