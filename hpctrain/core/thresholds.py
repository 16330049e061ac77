"""Size thresholds: from measured times to the candidate for each range of message sizes.

    bytes     1 KiB   2 KiB   4 KiB   8 KiB
    native       3       4       8      16  us
    direct       6       6       7       9
    chosen    native  native   ......direct      threshold where the lines cross, 2 to 4 KiB

A candidate is an algorithm, or a path of a message. The choice changes only for a gain of more than
5 %: smaller differences are noise, and the loss is small.
"""

from __future__ import annotations

import math
from itertools import pairwise

MIN_GAIN = 1.05

Times = dict[int, dict[str, float]]  #: {bytes, ascending: {candidate: seconds}}
Thresholds = tuple[tuple[int, str], ...]  #: ((min bytes, candidate), ...), ascending from 0


def lookup(thresholds: Thresholds, nbytes: int) -> str:
    """Return the candidate for a message of `nbytes` bytes."""
    return [candidate for min_bytes, candidate in thresholds if min_bytes <= nbytes][-1]


def thresholds_from(times: Times, default: str) -> Thresholds:
    """Return the sizes at which the choice changes; `default` if nothing was timed."""
    choices = choices_at(times)
    result = [(0, choices[min(choices)] if choices else default)]
    for small, large in pairwise(choices):
        if choices[small] != choices[large]:
            result.append(
                (
                    _find_crossing(times, small, large, choices[small], choices[large]),
                    choices[large],
                )
            )
    return tuple(result)


def choices_at(times: Times) -> dict[int, str]:
    """Return the candidate chosen at each size: the previous one unless another is 5 % faster."""
    choices: dict[int, str] = {}
    current = ""
    for nbytes, seconds in times.items():
        fastest = min(seconds, key=seconds.__getitem__)
        if seconds.get(current, math.inf) > MIN_GAIN * seconds[fastest]:
            current = fastest
        choices[nbytes] = current
    return choices


def _find_crossing(times: Times, small: int, large: int, old: str, new: str) -> int:
    """Return the size in (small, large] from which `new` is faster than `old`.

    Log-log interpolation; the geometric middle if one of the four times is missing.
    """
    fraction = 0.5
    if old in times[large] and new in times[small]:
        log_ratio_small, log_ratio_large = (
            math.log(times[n][old] / times[n][new]) for n in (small, large)
        )
        fraction = (
            min(max(-log_ratio_small / (log_ratio_large - log_ratio_small), 0.0), 1.0)
            if log_ratio_large > log_ratio_small
            else 0.0
        )
    return max(small + 1, round(small * (large / small) ** fraction))
