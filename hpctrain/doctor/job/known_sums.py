"""Each all-reduce, on integers whose sum is known: a wrong sum trains a wrong model.

Rank r contributes r + 1 times the numbers i mod 1009; the sum is P (P + 1) / 2 times these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain import collectives
from hpctrain.core.errors import HpctrainError
from hpctrain.doctor.check import Check
from hpctrain.transport.placement.check import named
from hpctrain.tuning.select import auto
from hpctrain.world import World

PERIOD = 1009


def names(world: World) -> list[str]:
    """Return the algorithms that can run on these nodes."""
    excluded = {"null"} | ({"direct"} if len(world.main.nodes) > 1 else set())
    return ["auto", *(name for name in collectives.ALLREDUCE if name not in excluded)]


def failed_algorithms(world: World) -> list[str]:
    """Return the algorithms with a wrong sum on this rank; collective."""
    return [name for name in names(world) if not _is_correct(world, name)]


def check(failures: Sequence[Sequence[str]], tried: Sequence[str]) -> Check:
    """Return the check of the algorithms that gave a wrong sum on each rank."""
    bad = {name: [rank for rank, failed in enumerate(failures) if name in failed] for name in tried}
    bad = {name: ranks for name, ranks in bad.items() if ranks}
    if not bad:
        return Check("sums", "ok", f"right on all ranks: {', '.join(tried)}")
    observed = "; ".join(f"{name} is wrong on {named(ranks)}" for name, ranks in bad.items())
    if set(bad) == {"native"}:
        return Check("sums", "bad", f"{observed}: the MPI library's own",
                     "use another one: [wire] algorithm; tell the site")  # fmt: skip
    return Check("sums", "bad", observed, "messages are damaged, or shared memory is: try MPI over "
                 "another transport (UCX_TLS, OMPI_MCA_btl), and tell us")  # fmt: skip


def _is_correct(world: World, name: str) -> bool:
    """Return whether `name` sums correctly: one element, one more than ranks, several segments."""
    allreduce = auto if name == "auto" else collectives.ALLREDUCE[name]
    correct = True
    for length in (1, world.size + 1, 100_003):
        numbers = np.arange(length) % PERIOD
        x = numbers * (world.rank + 1)
        try:
            allreduce(world.main, x, np.add)
        except HpctrainError:  # on all ranks alike; otherwise the watch names the missing rank
            return False
        correct &= bool((x == numbers * (world.size * (world.size + 1) // 2)).all())
    return correct
