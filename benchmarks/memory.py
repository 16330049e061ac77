"""Claim: an all-reduce of 256 MiB needs at most 8 MiB of memory beside its array.

    python benchmarks/memory.py [--ranks 4]

The kernel's own peak of the resident set (VmHWM), reset before each call; the rank that grows
most counts. The first call of each algorithm is the one measured: later ones find the scratch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from lib.common import make_parser, report_result, start_world

from hpctrain.collectives import ALLREDUCE, Group, all_gather_short

MESSAGE_BYTES = 256 << 20


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    world = start_world(arguments.ranks)
    x, rows = np.ones(MESSAGE_BYTES // 4, np.float32), []
    for name, function in ALLREDUCE.items():
        group = Group(world.link)
        function(group, np.ones(1024, np.float32), np.add)  # connections are made on first use
        world.link.barrier()
        base_bytes = reset_peak()
        function(group, x, np.add)
        growth = np.array([peak_bytes() - base_bytes])
        max_growth = int(all_gather_short(world.link, growth.view(np.uint8)).view(np.int64).max())
        rows.append(
            {
                "algorithm": name,
                "bytes": MESSAGE_BYTES,
                "ranks": world.size,
                "grown_bytes": max_growth,
                "chunk_bytes": MESSAGE_BYTES // world.size,
                "grown_in_chunks": max_growth * world.size / MESSAGE_BYTES,
            }
        )
    own_rows = [row for row in rows if row["algorithm"] != "native"]
    claims = {
        f"{row['algorithm']} grows by {row['grown_bytes'] / 2**20:.1f} MiB, <= 8 and <= a chunk": (
            row["grown_bytes"] <= min(8 << 20, row["chunk_bytes"])
        )
        for row in own_rows
    }
    report_result(world, f"memory-{world.size}-ranks", rows, claims)


def reset_peak() -> int:
    """Set the peak back to what is resident now, and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
