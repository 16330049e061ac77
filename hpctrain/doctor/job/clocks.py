"""The clocks of the nodes compared with rank 0's: file times and logs of a job depend on them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from hpctrain.doctor.check import Check
from hpctrain.training.timeline import clock_offset
from hpctrain.watch.trace import Reading
from hpctrain.world import World

LITTLE_S, MUCH_S = 0.1, 1.0


def reading(world: World, kernels: Sequence[str]) -> Reading:
    """Return the offset of this rank's clock behind rank 0's; collective.

    The first rank on each kernel measures; `kernels` are those of all ranks.
    """
    firsts = {kernels.index(name) for name in kernels if name != kernels[0]}
    return clock_offset(world.link, sorted(firsts), time.time)


def check(behind_s: Mapping[str, Reading]) -> Check:
    """Return the check of the nodes' clocks."""
    worst = max(behind_s, key=lambda node: abs(behind_s[node].offset_s))
    largest = behind_s[worst]
    skew = abs(largest.offset_s)
    if len(behind_s) == 1 or skew <= LITTLE_S:
        observed = f"apart by {skew * 1e3:.1f} ms at most (+- {largest.uncertainty_s * 1e3:.1f})"
        return Check("clocks", "ok", observed)
    word = "behind" if largest.offset_s > 0 else "ahead of"
    observed = f"{worst} is {skew:.1f} s {word} rank 0's node"
    wrong = tuple(node for node, clock in behind_s.items() if abs(clock.offset_s) > MUCH_S)
    return Check("clocks", "slow" if wrong else "note", f"{observed}: logs and file times mislead",
                 "ask the site for chrony or ntpd on it: timedatectl", wrong)  # fmt: skip
