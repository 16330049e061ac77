"""The laws of Amdahl and Gustafson, fitted to measurements: the serial fraction of a step.

Strong scaling: a fixed problem on P ranks. The fraction s of the time on one rank is serial:

    T(P) = T(1) (s + (1 - s) / P)          speed-up <= 1 / s

Source: Amdahl, "Validity of the single processor approach to achieving large scale computing
capabilities", 1967. Weak scaling: a problem that grows with P. The fraction s of the time on the
parallel machine is serial:

    speed-up(P) = s + (1 - s) P

Source: Gustafson, "Reevaluating Amdahl's law", 1988. Both are a + b x with a, b >= 0 and
s = a / (a + b), fitted by least squares of relative errors; the smallest size may have several
ranks. In training, s covers all time that does not shrink with P, mainly communication. That time
varies with P, so s describes the measured sizes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.tuning.model.fit import solve_nonnegative

Floats = Sequence[float]


def fit_amdahl(ranks: Sequence[int], seconds: Floats) -> float:
    """Return the serial fraction of steps that take `seconds` on `ranks`: strong scaling."""
    return _constant_fraction(1 / np.array(ranks, float), np.array(seconds, float))


def fit_gustafson(ranks: Sequence[int], rates: Floats) -> float:
    """Return the serial fraction if `ranks` reach `rates` in samples/s: weak scaling."""
    return _constant_fraction(np.array(ranks, float), np.array(rates, float))


def _constant_fraction(x: np.ndarray, y: np.ndarray) -> float:
    """Return a / (a + b) of the fit y = a + b x with a, b >= 0."""
    b, a = solve_nonnegative(np.stack([x, np.ones_like(x)], 1), y).tolist()
    return float(a / (a + b))


def max_misfit(law_values: Floats, measured: Floats) -> float:
    """Return the largest relative distance of `measured` from the best multiple of `law_values`."""
    ratio = np.array(law_values, float) / np.array(measured, float)
    return float(np.abs(ratio * ratio.sum() / np.square(ratio).sum() - 1).max())


def amdahl_speed_up(fraction: float, ranks: float) -> float:
    """Return the speed-up of `ranks` over one by Amdahl's law."""
    return 1 / (fraction + (1 - fraction) / ranks)


def gustafson_speed_up(fraction: float, ranks: float) -> float:
    """Return the scaled speed-up of `ranks` over one by Gustafson's law."""
    return fraction + (1 - fraction) * ranks
