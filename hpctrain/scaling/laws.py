"""The two laws of scaling, fitted to measurements: how large is the serial fraction?

Strong scaling, a fixed problem on P ranks. Part s of the time on one rank cannot be shared:

    T(P) = T(1) (s + (1 - s) / P)          speed-up <= 1 / s

Source: Amdahl, "Validity of the single processor approach to achieving large scale computing
capabilities", 1967. Weak scaling, a problem that grows with P. Part s of the time on the parallel
machine is not shared:

    speed-up(P) = s + (1 - s) P

Source: Gustafson, "Reevaluating Amdahl's law", 1988. Both are a + b x with a, b >= 0 and
s = a / (a + b), so that sizes need not begin with one rank; least squares of relative errors. In
training, s stands for all that does not shrink with P, first of all communication, which is not
constant in P: it describes the sizes that were measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.cost_model.fit import nonnegative

Numbers = Sequence[float]


def amdahl(ranks: Sequence[int], seconds: Numbers) -> float:
    """Return the serial fraction of steps that take `seconds` on `ranks`: strong scaling."""
    return _constant_part(1 / np.array(ranks, float), np.array(seconds, float))


def gustafson(ranks: Sequence[int], rates: Numbers) -> float:
    """Return the serial fraction where `ranks` reach `rates` in samples/s: weak scaling."""
    return _constant_part(np.array(ranks, float), np.array(rates, float))


def _constant_part(x: np.ndarray, y: np.ndarray) -> float:
    """Return a / (a + b) for y = a + b x; the slope goes first where either alone would do."""
    b, a = nonnegative(np.stack([x, np.ones_like(x)], 1), y).tolist()
    return float(a / (a + b))


def misfit(shape: Numbers, measured: Numbers) -> float:
    """Return the largest distance of `measured` from the best multiple of `shape`, as a share."""
    ratio = np.array(shape, float) / np.array(measured, float)
    return float(np.abs(ratio * ratio.sum() / np.square(ratio).sum() - 1).max())


def amdahl_speed_up(fraction: float, ranks: float) -> float:
    """Return the speed-up of `ranks` over one by Amdahl's law."""
    return 1 / (fraction + (1 - fraction) / ranks)


def gustafson_speed_up(fraction: float, ranks: float) -> float:
    """Return the scaled speed-up of `ranks` over one by Gustafson's law."""
    return fraction + (1 - fraction) * ranks
