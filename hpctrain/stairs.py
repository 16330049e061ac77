"""From times of rivals over lengths to the staircase of who is taken: algorithms, or paths.

    bytes     1 KiB   2 KiB   4 KiB   8 KiB
    native       3       4       8      16  us
    direct       6       6       7       9
    taken     native  native   ......direct      steps where the lines cross, between 2 and 4 KiB

A step to another rival is taken only for a gain of more than 5 %: less is noise, and so small is
the loss.
"""

from __future__ import annotations

import math
from itertools import pairwise

HYSTERESIS = 1.05

Times = dict[int, dict[str, float]]  #: {bytes, ascending: {rival: seconds}}
Steps = tuple[tuple[int, str], ...]  #: ((from how many bytes on, rival), ...), first from 0


def at(stair: Steps, nbytes: int) -> str:
    """Return who is taken for `nbytes` bytes."""
    return [name for start, name in stair if start <= nbytes][-1]


def steps(times: Times, otherwise: str) -> Steps:
    """Return where another rival becomes the fastest; `otherwise` where nobody was timed."""
    taken = taken_at(times)
    found = [(0, taken[min(taken)] if taken else otherwise)]
    for a, b in pairwise(taken):
        if taken[a] != taken[b]:
            found.append((_crossing(times, a, b, taken[a], taken[b]), taken[b]))
    return tuple(found)


def taken_at(times: Times) -> dict[int, str]:
    """Return who is taken at each length: the one before unless another is 5 % faster."""
    taken: dict[int, str] = {}
    last = ""
    for nbytes, seconds in times.items():
        best = min(seconds, key=seconds.__getitem__)
        if seconds.get(last, math.inf) > HYSTERESIS * seconds[best]:
            last = best
        taken[nbytes] = last
    return taken


def _crossing(times: Times, a: int, b: int, old: str, new: str) -> int:
    """Return from how many bytes between `a` and `b` on `new` is faster than `old`.

    Lines between the two lengths, both axes logarithmic; the middle where one was not measured.
    """
    share = 0.5
    if old in times[b] and new in times[a]:
        before, after = (math.log(times[n][old] / times[n][new]) for n in (a, b))
        share = min(max(-before / (after - before), 0.0), 1.0) if after > before else 0.0
    return max(a + 1, round(a * (b / a) ** share))
