"""Confidence intervals of the mean of a few repeats, and laws of scaling.

By Student's t distribution (1908): with mean m and standard deviation s of n repeats the interval
is m -+ t s / sqrt(n), where T of Student's distribution with v = n - 1 degrees of freedom satisfies
P(|T| > t) = 5 %. P(|T| < t) has a closed form in the angle x = arctan(t / sqrt(v)):

    v odd     2/pi (x + sin x (cos x + 2/3 cos^3 x + ... + (2 4 .. v-3)/(3 5 .. v-2) cos^(v-2) x))
    v even    sin x (1 + 1/2 cos^2 x + ... + (1 3 .. v-3)/(2 4 .. v-2) cos^(v-2) x)

Source: Abramowitz and Stegun, "Handbook of mathematical functions", 1964, 26.7.3 and 26.7.4.

The laws of Amdahl and Gustafson are fitted to measurements: the serial fraction of a step. Strong
scaling: a fixed problem on P ranks. The fraction s of the time on one rank is serial:

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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np

from hpctrain.tuning.model.fit import solve_nonnegative

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean of `count` repeats and its half interval, which is None for a single repeat."""

    mean: float
    half: float | None
    count: int


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Return the mean of `values` and its interval of 95 % confidence."""
    n = len(values)
    half = quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None
    return Estimate(fmean(values), half, n)


@cache
def quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return t with P(|T| < t) = `confidence`, by bisection of the angle."""
    min_angle, max_angle = 0.0, math.pi / 2
    for _ in range(60):
        angle = (min_angle + max_angle) / 2
        min_angle, max_angle = (
            (angle, max_angle)
            if central_probability(angle, degrees) < confidence
            else (min_angle, angle)
        )
    return math.tan(min_angle) * math.sqrt(degrees)


def central_probability(angle: float, degrees: int) -> float:
    """Return P(|T| < t) for t = sqrt(freedom) tan(angle)."""
    sin_angle, cos_angle, is_odd = math.sin(angle), math.cos(angle), degrees % 2
    total, term = 0.0, cos_angle if is_odd else 1.0
    for i in range(1 + is_odd, degrees, 2):
        total += term
        term *= i / (i + 1) * cos_angle**2
    return 2 / math.pi * (angle + sin_angle * total) if is_odd else sin_angle * total


def fit_amdahl(ranks: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the serial fraction of steps that take `seconds` on `ranks`: strong scaling."""
    return _constant_fraction(1 / np.array(ranks, float), np.array(seconds, float))


def fit_gustafson(ranks: Sequence[int], rates: Sequence[float]) -> float:
    """Return the serial fraction if `ranks` reach `rates` in samples/s: weak scaling."""
    return _constant_fraction(np.array(ranks, float), np.array(rates, float))


def _constant_fraction(x: np.ndarray, y: np.ndarray) -> float:
    """Return a / (a + b) of the fit y = a + b x with a, b >= 0."""
    b, a = solve_nonnegative(np.stack([x, np.ones_like(x)], 1), y).tolist()
    return float(a / (a + b))


def max_misfit(law_values: Sequence[float], measured: Sequence[float]) -> float:
    """Return the largest relative distance of `measured` from the best multiple of `law_values`."""
    ratio = np.array(law_values, float) / np.array(measured, float)
    return float(np.abs(ratio * ratio.sum() / np.square(ratio).sum() - 1).max())


def amdahl_speed_up(fraction: float, ranks: float) -> float:
    """Return the speed-up of `ranks` over one by Amdahl's law."""
    return 1 / (fraction + (1 - fraction) / ranks)


def gustafson_speed_up(fraction: float, ranks: float) -> float:
    """Return the scaled speed-up of `ranks` over one by Gustafson's law."""
    return fraction + (1 - fraction) * ranks
