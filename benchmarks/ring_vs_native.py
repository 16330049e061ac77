"""Claim: in a node, our ring is at least as fast as MPI_Allreduce in place, from 16 MiB on.

    python benchmarks/ring_vs_native.py [--ranks 2] [--rounds 30]

Both on the same float32 buffer, taken in turn in one run; per round the slowest rank counts.
busbw = bytes / time * 2(P-1)/P, as nccl-tests defines it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from _common import interleaved, options, paired_ratio, spread, world_of, write

from hpctrain.collectives import ALLREDUCE, Group

MIB = 1 << 20
SIZES = [n * MIB for n in (1, 4, 16, 64, 128)]


def main() -> None:
    arguments = options(__doc__).parse_args()
    world = world_of(arguments.ranks)
    group, rows = Group(world.link), []
    for size in SIZES:
        x = np.zeros(size // 4, np.float32)
        rivals = {name: partial(ALLREDUCE[name], group, x, np.add) for name in ("ring", "native")}
        seconds = interleaved(world.link, rivals, arguments.rounds)
        ratio = paired_ratio(seconds["native"], seconds["ring"])
        for name, taken in seconds.items():
            found = spread(taken)
            algbw = size / found["median_s"] / 1e9
            rows.append(
                {
                    "operation": "allreduce",
                    "algorithm": name,
                    "bytes": size,
                    "ranks": world.size,
                    **found,
                    "algbw": algbw,
                    "busbw": algbw * 2 * (world.size - 1) / world.size,
                    "correct": correct(group, name),
                    "speed_up_over_native": ratio if name == "ring" else 1.0,
                }
            )
    write(world, "ring_vs_native", rows)


def correct(group: Group, name: str) -> bool:
    """Return whether random data are summed to what float64 says."""
    values = [
        np.random.default_rng(rank).standard_normal(99_991) for rank in range(group.link.size)
    ]
    x = values[group.link.rank].astype(np.float32)
    ALLREDUCE[name](group, x, np.add)
    return bool(np.allclose(x, np.sum(values, 0), atol=1e-4))


if __name__ == "__main__":
    main()
