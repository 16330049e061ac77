"""Claims: in a node, our ring is at least as fast as MPI_Allreduce in place, from 16 MiB on; cut
into segments it is at least 1.2 times as fast as uncut at 64 MiB.

    python benchmarks/ring_vs_native.py [--ranks 2] [--rounds 30]

All on the same float32 buffer, taken in turn in one run; per round the slowest rank counts.
busbw = bytes / time * 2(P-1)/P, as nccl-tests defines it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from _common import interleaved, options, paired_ratio, spread, world_of, write

from hpctrain.collectives import Group
from hpctrain.collectives.native import native
from hpctrain.collectives.ring import plain_ring, ring

MIB = 1 << 20
RIVALS = {"ring": ring, "plain-ring": plain_ring, "native": native}
SIZES = [n * MIB for n in (1, 4, 16, 64, 128)]


def main() -> None:
    arguments = options(__doc__).parse_args()
    world = world_of(arguments.ranks)
    group, rows = Group(world.link), []
    for size in SIZES:
        x = np.zeros(size // 4, np.float32)
        rivals = {name: partial(f, group, x, np.add) for name, f in RIVALS.items()}
        seconds = interleaved(world.link, rivals, arguments.rounds)
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
                    "speed_up_of_ring": paired_ratio(taken, seconds["ring"]),
                }
            )
    by = {(row["algorithm"], row["bytes"] // MIB): row["speed_up_of_ring"] for row in rows}
    claims = {
        f"ring {by['native', n]:.2f}x MPI_Allreduce at {n} MiB, >= 1": by["native", n] >= 1
        for n in (16, 64, 128)
    }
    segments = by["plain-ring", 64]
    claims[f"segments {segments:.2f}x at 64 MiB, >= 1.2"] = segments >= 1.2
    claims["all sums are right"] = all(row["correct"] for row in rows)
    write(world, "ring_vs_native", rows, claims)


def correct(group: Group, name: str) -> bool:
    """Return whether random data are summed to what float64 says."""
    values = [
        np.random.default_rng(rank).standard_normal(99_991) for rank in range(group.link.size)
    ]
    x = values[group.link.rank].astype(np.float32)
    RIVALS[name](group, x, np.add)
    return bool(np.allclose(x, np.sum(values, 0), atol=1e-4))


if __name__ == "__main__":
    main()
