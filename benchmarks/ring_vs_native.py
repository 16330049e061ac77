"""Claims: in a node, our ring is at least as fast as MPI_Allreduce in place, from 16 MiB on; cut
into segments it is at least 1.2 times as fast as uncut at 64 MiB.

    python benchmarks/ring_vs_native.py [--ranks 2] [--rounds 30]

All on the same float32 buffer, taken in turn in one run; per round the slowest rank counts.
busbw = bytes / time * 2(P-1)/P, as nccl-tests defines it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from lib.common import (
    make_parser,
    median_ratio,
    report_result,
    start_world,
    summarize_times,
    time_interleaved,
)

from hpctrain.collectives import Group
from hpctrain.collectives.native import native
from hpctrain.collectives.ring import plain_ring, ring

MIB = 1 << 20
RIVALS = {"ring": ring, "plain-ring": plain_ring, "native": native}
SIZES = [mib * MIB for mib in (1, 4, 16, 64, 128)]


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    world = start_world(arguments.ranks)
    group, rows = Group(world.link), []
    for size in SIZES:
        x = np.zeros(size // 4, np.float32)
        rivals = {name: partial(function, group, x, np.add) for name, function in RIVALS.items()}
        seconds = time_interleaved(world.link, rivals, arguments.rounds)
        for name, times in seconds.items():
            statistics = summarize_times(times)
            algbw = size / statistics["median_s"] / 1e9
            rows.append(
                {
                    "operation": "allreduce",
                    "algorithm": name,
                    "bytes": size,
                    "ranks": world.size,
                    **statistics,
                    "algbw": algbw,
                    "busbw": algbw * 2 * (world.size - 1) / world.size,
                    "correct": is_correct(group, name),
                    "speed_up_of_ring": median_ratio(times, seconds["ring"]),
                }
            )
    speed_up_of_ring = {
        (row["algorithm"], row["bytes"] // MIB): row["speed_up_of_ring"] for row in rows
    }
    claims = {}
    for mib in (16, 64, 128):
        ratio = speed_up_of_ring["native", mib]
        claims[f"ring {ratio:.2f}x MPI_Allreduce at {mib} MiB, >= 1"] = ratio >= 1
    segment_ratio = speed_up_of_ring["plain-ring", 64]
    claims[f"segments {segment_ratio:.2f}x at 64 MiB, >= 1.2"] = segment_ratio >= 1.2
    claims["all sums are right"] = all(row["correct"] for row in rows)
    report_result(world, "ring_vs_native", rows, claims)


def is_correct(group: Group, name: str) -> bool:
    """Return whether the sum of random data agrees with float64."""
    values = [
        np.random.default_rng(rank).standard_normal(99_991) for rank in range(group.link.size)
    ]
    x = values[group.link.rank].astype(np.float32)
    RIVALS[name](group, x, np.add)
    return bool(np.allclose(x, np.sum(values, 0), atol=1e-4))


if __name__ == "__main__":
    main()
