"""Check every all-reduce on integers whose sum is known, since wrong sums train wrong models.

At index i, rank r contributes (r + 1) (i mod 1009). The sum is (i mod 1009) P (P + 1) / 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain import collectives
from hpctrain.core.errors import HpctrainError
from hpctrain.core.names import format_ranks
from hpctrain.tools.doctor.check import Check
from hpctrain.tuning.select import auto
from hpctrain.world import World

NUMBER_PERIOD = 1009


def algorithm_names(world: World) -> list[str]:
    """Return the algorithms that can run on these nodes."""
    unsuitable_algorithms = {"null"} | ({"direct"} if len(world.main.nodes) > 1 else set())
    return ["auto", *(name for name in collectives.ALLREDUCE if name not in unsuitable_algorithms)]


def find_failed_algorithms(world: World) -> list[str]:
    """Return the algorithms with a wrong sum on this rank; collective."""
    return [name for name in algorithm_names(world) if not _is_correct(world, name)]


def check_sums(failures: Sequence[Sequence[str]], tried_algorithms: Sequence[str]) -> Check:
    """Return the check of the algorithms; `failures` lists the failed algorithms of each rank."""
    failed_ranks = {
        name: [rank for rank, failed_names in enumerate(failures) if name in failed_names]
        for name in tried_algorithms
    }
    failed_ranks = {name: ranks for name, ranks in failed_ranks.items() if ranks}
    if not failed_ranks:
        return Check("sums", "ok", f"right on all ranks: {', '.join(tried_algorithms)}")
    observed = "; ".join(
        f"{name} is wrong on {format_ranks(ranks)}" for name, ranks in failed_ranks.items()
    )
    if set(failed_ranks) == {"native"}:
        return Check("sums", "bad", f"{observed}: the MPI library's own",
                     "use another one: [wire] algorithm; tell the site")  # fmt: skip
    return Check("sums", "bad", observed, "messages or shared memory are damaged: try another "
                 "transport of MPI (UCX_TLS, OMPI_MCA_btl), and report it to us")  # fmt: skip


def _is_correct(world: World, name: str) -> bool:
    """Return whether algorithm `name` is correct on 1, P + 1 and 100,003 elements."""
    allreduce = auto if name == "auto" else collectives.ALLREDUCE[name]
    is_correct = True
    for length in (1, world.size + 1, 100_003):
        numbers = np.arange(length) % NUMBER_PERIOD
        x = numbers * (world.rank + 1)
        try:
            allreduce(world.main, x, np.add)
        except HpctrainError:  # all ranks raise it; otherwise the watch names the missing rank
            return False
        is_correct &= bool((x == numbers * (world.size * (world.size + 1) // 2)).all())
    return is_correct
