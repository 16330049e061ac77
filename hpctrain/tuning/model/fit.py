"""From measured times to a machine: least squares of relative errors, with no cost below zero.

    one way, from message to message     g  + m G
    there and back, half of it       L + 2o + m G
    both ways at once                L + 2o + m G of both ways
    the call that starts a send          o            (of a short message)
    adding m bytes                           m gamma
    a collective                     steps alpha + bytes beta + added gamma     (cost.py)

Times span five decades, and an error of 10 % is as bad at 1 us as at 1 s: so each equation is
divided by the time that was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from hpctrain.tuning.model import cost
from hpctrain.tuning.model.loggp import Array, Wire

#: (bytes, seconds) of messages of several lengths.
Times = Sequence[tuple[int, float]]


def fit_wire(one_way: Times, round_trip: Times, duplex_times: Times, overhead: float) -> Wire:
    """Return the wire on which messages take the measured seconds.

    One-way messages wait for no answer, so the long ones determine G. A long message's time on the
    wire hides the processors' overhead of a short one, which therefore must not count for g.
    """
    gap, seconds_per_byte = fit_line(_select_long(one_way))
    duplex_seconds_per_byte = max(seconds_per_byte, fit_line(_select_long(duplex_times))[1])
    shortest_s = min(round_trip)[1]
    return Wire(
        max(shortest_s - 2 * overhead, 0.0),
        overhead,
        min(gap, min(one_way)[1]),
        seconds_per_byte,
        duplex_seconds_per_byte,
    )


def _select_long(times: Times) -> Times:
    """Return the times of at least ten times the shortest, or all if there are too few."""
    limit = 10 * min(times)[1]
    long_messages = [(m, t) for m, t in times if t >= limit]
    return long_messages if len(long_messages) > 1 else times


def fit_line(times: Times) -> tuple[float, float]:
    """Return (a, b), seconds and seconds per byte, of the best fit a + m b."""
    m, t = np.array(times, float).T
    a, b = solve_nonnegative(np.stack([np.ones_like(m), m], 1), t)
    return float(a), float(b)


def fit_machine(measured_costs: Iterable[tuple[cost.Cost, float]]) -> cost.Machine:
    """Return the machine on which the longest paths take the measured seconds."""
    paths, seconds = zip(*measured_costs, strict=True)
    coefficients = np.array([(path.steps, path.bytes, path.added_bytes) for path in paths], float)
    return cost.Machine(*map(float, solve_nonnegative(coefficients, np.array(seconds))))


def solve_nonnegative(coefficients: Array, seconds: Array) -> Array:
    """Return x >= 0 that minimises the relative error of `coefficients` (rows, columns) @ x.

    Tries every set of nonzero columns; there are few.
    """
    scaled, ones = coefficients / seconds[:, None], np.ones(len(seconds))
    best_costs, min_error = np.zeros(coefficients.shape[1]), float(len(seconds))
    for count in range(1, coefficients.shape[1] + 1):
        for columns in combinations(range(coefficients.shape[1]), count):
            solution, *_ = np.linalg.lstsq(scaled[:, columns], ones, rcond=None)
            error = float(np.sum((scaled[:, columns] @ solution - 1) ** 2))
            if error < min_error and (solution >= 0).all():
                best_costs, min_error = np.zeros(coefficients.shape[1]), error
                best_costs[list(columns)] = solution
    return best_costs
