"""bfloat16 in arrays of uint16: the upper half of a float32, rounded to nearest, ties to even.

    float32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
    bfloat16  s eeeeeeee mmmmmmm|

The range of float32 with 8 digits in place of 24. NumPy has no such dtype, and these few lines
spare us a package. Source: Kalamkar et al., "A study of bfloat16 for deep learning training", 2019.
"""

from __future__ import annotations

import numpy as np

BLOCK = 65_536  # elements that are held in float32 at once: they stay in the second-level cache
NAN = 0x7FC0
UPPER = 1 if np.little_endian else 0  # which half of a float32 that is


def narrow(x: np.ndarray, out: np.ndarray) -> None:
    """Round flat `x`, float32 or float64, to bfloat16 in `out`, uint16."""
    for start in range(0, x.size, BLOCK):
        part = slice(start, start + BLOCK)
        _narrow(x[part].astype(np.float32, copy=False), out[part])


def widen(y: np.ndarray, out: np.ndarray) -> None:
    """Copy flat `y`, bfloat16 in uint16, to `out`, float32 or float64: nothing is lost."""
    for start in range(0, y.size, BLOCK):
        part = slice(start, start + BLOCK)
        out[part] = _wide(y[part])


def add(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Add in float32, round once; all arrays bfloat16 in uint16. Called as NumPy's ufuncs are."""
    for start in range(0, a.size, BLOCK):
        part = slice(start, start + BLOCK)
        wide = _wide(a[part])
        wide += _wide(b[part])
        _narrow(wide, out[part])
    return out


def _wide(y: np.ndarray) -> np.ndarray:
    bits = y.astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _narrow(x: np.ndarray, out: np.ndarray) -> None:
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1  # half of the last place, and no more than half where the kept part is even
    rounded += bits
    rounded += 0x7FFF
    out[...] = rounded.view(np.uint16)[UPPER::2]
    if np.isnan(x.max()):  # rounding carries some NaNs over to zero
        out[np.isnan(x)] = NAN
