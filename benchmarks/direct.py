"""Claim: inside a node, sums out of neighbours' memory move at >= 90 % of what memory gives.

    python benchmarks/direct.py [--ranks 2] [--rounds 21] [--sizes 67108864,134217728]

At 64 and 128 MiB, float32, bound calls of `direct` on arrays of `world.zeros`, taken in turn with
their floors: all ranks stream `a += b` over private arrays until they have moved as many bytes as

- shared, one result for all, must move: (P + 1) n;
- in-place, the sum written back to all P arrays, must: 2 P n.

How many times faster than MPI's own this is, at all sizes, is what benchmarks/compare.py claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from lib.common import (
    make_parser,
    median_ratio,
    report_result,
    start_world,
    summarize_times,
    time_interleaved,
)

from hpctrain.world import World
from hpctrain.world.calls.calls import bind

SIZES = [64 << 20, 128 << 20]
MIN_SHARE = 0.9


def main() -> None:
    parser = make_parser(__doc__.split("\n\n")[0])
    parser.set_defaults(rounds=21)
    sizes = {"type": lambda text: [int(count) for count in text.split(",")], "default": SIZES}
    parser.add_argument("--sizes", **sizes, help="bytes, which must not fit into the caches")
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    rows = [
        row for count in arguments.sizes for row in measure_size(world, count, arguments.rounds)
    ]
    claims = {
        f"{row['what']}, {row['bytes'] >> 20} MiB: {row['share_of_floor']:.3f} of the floor of "
        f"memory, >= {MIN_SHARE}": row["share_of_floor"] >= MIN_SHARE
        for row in rows
    }
    report_result(world, f"direct-{world.size}-ranks", rows, claims)


def measure_size(world: World, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for either form at this size."""
    count, ranks = nbytes // 4, world.size
    x = world.zeros(count)
    calls: Mapping[str, Callable[[], object]] = {
        "shared": bind(x, algorithm="direct", result="shared", world=world),
        "in-place": bind(x, algorithm="direct", world=world),
    }
    bytes_moved = {"shared": (ranks + 1) * nbytes, "in-place": 2 * ranks * nbytes}
    floor_calls = {
        f"floor of {name}": make_stream_call(bytes_moved[name] // ranks) for name in calls
    }
    seconds = time_interleaved(world.link, calls | floor_calls, rounds)
    return [
        {
            "bytes": nbytes,
            "ranks": ranks,
            "what": name,
            **summarize_times(seconds[name]),
            "floor_s": float(np.median(floor := seconds[f"floor of {name}"])),
            "gb_per_s": bytes_moved[name] / float(np.median(seconds[name])) / 1e9,
            "share_of_floor": median_ratio(floor, seconds[name]),
        }
        for name in calls
    ]


def make_stream_call(nbytes: int) -> Callable[[], object]:
    """Return a call that moves `nbytes` bytes: `a += b` reads two arrays and writes one."""
    a, b = np.ones((2, nbytes // 12), np.float32)  # written once: pages of their own
    b[:] = 0
    return partial(np.add, a, b, a)


if __name__ == "__main__":
    main()
