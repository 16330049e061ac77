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

from hpctrain.cost_model import cost
from hpctrain.cost_model.loggp import Array, Wire

#: (bytes, seconds) of messages of several lengths.
Times = Sequence[tuple[int, float]]


def wire(one_way: Times, there_and_back: Times, both_ways: Times, overhead: float) -> Wire:
    """Return the wire on which messages take the measured seconds.

    One-way messages wait for no answer, so the long ones determine G. A long message's time on the
    wire hides the processors' overhead of a short one, which therefore must not count for g.
    """
    gap, per_byte = line(_long(one_way))
    duplex = max(per_byte, line(_long(both_ways))[1])
    short_s = min(there_and_back)[1]
    return Wire(
        max(short_s - 2 * overhead, 0.0), overhead, min(gap, min(one_way)[1]), per_byte, duplex
    )


def _long(times: Times) -> Times:
    """Return the times of at least ten times the shortest, or all if there are too few."""
    limit = 10 * min(times)[1]
    long_messages = [(m, t) for m, t in times if t >= limit]
    return long_messages if len(long_messages) > 1 else times


def line(times: Times) -> tuple[float, float]:
    """Return (a, b), seconds and seconds per byte, of the best fit a + m b."""
    m, t = np.array(times, float).T
    a, b = nonnegative(np.stack([np.ones_like(m), m], 1), t)
    return float(a), float(b)


def machine(measured: Iterable[tuple[cost.Cost, float]]) -> cost.Machine:
    """Return the machine on which the longest paths take the measured seconds."""
    paths, seconds = zip(*measured, strict=True)
    table = np.array([(path.steps, path.bytes, path.added) for path in paths], float)
    return cost.Machine(*map(float, nonnegative(table, np.array(seconds))))


def nonnegative(table: Array, seconds: Array) -> Array:
    """Return x >= 0 for which `table` (rows, columns) times x is nearest to `seconds`, relatively.

    Tries all sets of nonzero columns, of which there are few.
    """
    scaled, ones = table / seconds[:, None], np.ones(len(seconds))
    best_costs, least_error = np.zeros(table.shape[1]), float(len(seconds))
    for count in range(1, table.shape[1] + 1):
        for chosen in combinations(range(table.shape[1]), count):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)
            error = float(np.sum((scaled[:, chosen] @ part - 1) ** 2))
            if error < least_error and (part >= 0).all():
                best_costs, least_error = np.zeros(table.shape[1]), error
                best_costs[list(chosen)] = part
    return best_costs
