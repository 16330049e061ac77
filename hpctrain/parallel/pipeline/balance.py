"""Cuts of a model into contiguous stages, so that the slowest stage is as fast as possible.

    layers   0   1   2   3   4   5          seconds 4 1 1 2 3 3, three stages
    stages   [ 0 ]   [ 1       ]  [2]       ...

The exact optimum by dynamic programming over suffixes, n^2 S operations on n layers:

    best(k, i) = min over j > i of max(seconds of layers i to j - 1, best(k - 1, j))

Among the cuts with the least maximum, the cut with the fewest bytes at its boundaries is taken;
among equals, the cut with the shortest first stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from hpctrain.core.errors import UsageError

Array = np.ndarray


def cut(
    seconds: Sequence[float], stages: int, boundary_bytes: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the number of layers of each stage, from the `seconds` of each layer.

    `boundary_bytes[i]`: bytes of the activation between the layers i and i + 1, for ties.
    """
    layers = len(seconds)
    _check_stage_count(layers, stages)
    for i, cost in enumerate(seconds):
        if not cost >= 0:
            raise UsageError(f"cut, layer {i}: expected seconds from 0 up, seen {cost}")
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    # The bytes that cross before each layer: none before the first.
    crossing_bytes = np.zeros(layers + 1)
    if len(boundary_bytes):
        if len(boundary_bytes) != layers - 1:
            raise UsageError(
                f"cut: expected the bytes of {layers - 1} boundaries between {layers} layers, "
                f"seen {len(boundary_bytes)}"
            )
        crossing_bytes[1:-1] = boundary_bytes
    return _fewest_bytes(sums, stages, crossing_bytes, _least_maximum(sums, stages))


def check_cut(layer_counts: Sequence[int], layers: int, stages: int) -> tuple[int, ...]:
    """Return `layer_counts`, a cut by hand; raise UsageError unless it fits."""
    _check_stage_count(layers, stages)
    counts = tuple(layer_counts)
    if len(counts) != stages:
        raise UsageError(f"cut: expected the layers of {stages} stages, seen {len(counts)} numbers")
    if min(counts) < 1 or sum(counts) != layers:
        raise UsageError(
            f"cut: expected {stages} numbers from 1 up that add up to {layers} layers, seen "
            f"{', '.join(map(str, counts))}, which add up to {sum(counts)}"
        )
    return counts


def _check_stage_count(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise UsageError(
            f"cut: expected 1 to {layers} stages for {layers} layers, seen {stages}; "
            f"take {min(max(stages, 1), layers)} or fewer"
        )


def _least_maximum(sums: Array, stages: int) -> float:
    """Return the seconds of the slowest stage of the best cut."""
    best = sums[-1] - sums  # of one stage, by its first layer
    for _ in range(stages - 1):
        best = np.array(
            [_best_of(np.maximum(sums[i + 1 :] - s, best[i + 1 :])) for i, s in enumerate(sums)]
        )
    return float(best[0])


def _best_of(values: Array) -> float:
    return float(values.min()) if values.size else np.inf


def _fewest_bytes(sums: Array, stages: int, crossing: Array, slowest: float) -> tuple[int, ...]:
    """Return the cut with the fewest bytes between stages, each of at most `slowest` seconds."""
    best = np.where(sums[-1] - sums <= slowest, 0.0, np.inf)
    best[-1] = np.inf  # a stage has a layer
    ends: list[Array] = []
    for _ in range(stages - 1):
        totals = [
            np.where(sums[i + 1 :] - s <= slowest, crossing[i + 1 :] + best[i + 1 :], np.inf)
            for i, s in enumerate(sums)
        ]
        ends.insert(
            0, np.array([i + 1 + (t.argmin() if t.size else 0) for i, t in enumerate(totals)])
        )
        best = np.array([_best_of(t) for t in totals])
    bounds = accumulate(ends, lambda start, end: int(end[start]), initial=0)
    return tuple(np.diff([*bounds, len(sums) - 1]).tolist())
