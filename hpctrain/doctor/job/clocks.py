"""The clocks of the nodes beside rank 0's: files and logs of a job tell when by them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hpctrain.doctor.check import Check
from hpctrain.timeline import compared
from hpctrain.trace import Reading
from hpctrain.world import World

LITTLE_S, MUCH_S = 0.1, 1.0


def reading(world: World, kernels: Sequence[str]) -> Reading:
    """Return how far this rank's clock is behind rank 0's; collective.

    The first rank on each kernel asks; `kernels` are those of all ranks.
    """
    firsts = {kernels.index(one) for one in kernels if one != kernels[0]}
    return compared(world.link, sorted(firsts), time.time)


def check(behind_s: Mapping[str, Reading]) -> Check:
    """Return what is to be said of the nodes' clocks."""
    worst = max(behind_s, key=lambda node: abs(behind_s[node].offset_s))
    found = behind_s[worst]
    skew = abs(found.offset_s)
    if len(behind_s) == 1 or skew <= LITTLE_S:
        seen = f"apart by {skew * 1e3:.1f} ms at most (+- {found.uncertainty_s * 1e3:.1f})"
        return Check("clocks", "ok", seen)
    word = "behind" if found.offset_s > 0 else "ahead of"
    seen = f"{worst} is {skew:.1f} s {word} rank 0's node"
    wrong = tuple(node for node, one in behind_s.items() if abs(one.offset_s) > MUCH_S)
    return Check("clocks", "slow" if wrong else "note", f"{seen}: logs and file times mislead",
                 "ask the site for chrony or ntpd on it: timedatectl", wrong)  # fmt: skip
