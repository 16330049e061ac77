"""Claims: the vote of each step takes 20 us back to back, 60 us after 10 ms of compute, at most.

So it is less than 1 % of a step of 10 ms: whether somebody was asked to stop may be asked in each.

    python benchmarks/vote.py [--ranks 4] [--rounds 200]

All ranks of one node say two numbers and learn the largest (hpctrain/collectives/vote.py), beside
the same by messages (recursive doubling) and by the MPI library. After compute, of which each rank
does 10 ms in matrix products, the time is from the last rank's arrival until the last rank knows:
more ranks than cores arrive one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from _common import interleaved, options, spread, world_of, write

from hpctrain.collectives import all_gather_short
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.world import World

COMPUTE_S = 0.01


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(ranks=4, rounds=200)
    arguments = parser.parse_args()
    world = world_of(arguments.ranks)
    said = np.zeros(2, np.int64)
    votes = {
        "flags": lambda: elementwise_maximum(world.main, (0, 1)),
        "messages": lambda: recursive_doubling(world.main, said, np.maximum),
        "native": lambda: world.link.native.allreduce(said, np.maximum),
    }
    back_to_back = interleaved(world.link, votes, arguments.rounds, calls=50)
    late = {name: after_compute(world, vote, arguments.rounds) for name, vote in votes.items()}
    rows = [
        {"study": study, "vote": name, "ranks": world.size, **spread(seconds)}
        for study, by_name in (("back to back", back_to_back), ("after compute", late))
        for name, seconds in by_name.items()
    ]
    fast, after = (1e6 * float(np.median(found["flags"])) for found in (back_to_back, late))
    claims = {
        f"a vote takes {fast:.1f} us back to back, <= 20": fast <= 20,
        f"a vote after 10 ms of compute takes {after:.1f} us, <= 60": after <= 60,
        f"it is {after / COMPUTE_S / 1e4:.2f} % of such a step, < 1": after < 1e4 * COMPUTE_S,
    }
    write(world, f"vote-{world.size}-ranks", rows, claims)


def after_compute(world: World, vote: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds from the last arrival to the last departure; one clock for all ranks."""
    found = []
    for _ in range(rounds):
        compute(COMPUTE_S)
        times = [time.monotonic()]
        vote()
        times.append(time.monotonic())
        mine = np.array(times).view(np.uint8)
        both = all_gather_short(world.link, mine).view(np.float64)
        found.append(float(both[:, 1].max() - both[:, 0].max()))
    return found


def compute(seconds: float) -> None:
    """Multiply matrices for `seconds` of this process's own time."""
    a = np.ones((64, 64), np.float32)
    end = time.process_time() + seconds
    while time.process_time() < end:
        a @ a


if __name__ == "__main__":
    main()
