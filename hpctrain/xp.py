"""Which library an array belongs to; the one place outside the wire that knows CuPy exists."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Array = Any  #: a numpy.ndarray or a cupy.ndarray; no type says "either" without importing CuPy


def namespace(x: Array) -> Any:
    """Return the module, `numpy` or `cupy`, whose functions take the array `x`."""
    # Whoever holds a CuPy array has imported CuPy already, so looking is enough: an import here
    # would cost every CPU run a second and start CUDA before a device is chosen.
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return cupy
    return np
