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
from lib.common import make_parser, report_result, start_world, summarize_times, time_interleaved

from hpctrain.collectives import all_gather_short
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.world import World

COMPUTE_S = 0.01


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(ranks=4, rounds=200)
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    ballot = np.zeros(2, np.int64)
    votes = {
        "flags": lambda: elementwise_maximum(world.main, (0, 1)),
        "messages": lambda: recursive_doubling(world.main, ballot, np.maximum),
        "native": lambda: world.link.endpoint.native.bind_allreduce(ballot, np.maximum)(),
    }
    back_to_back = time_interleaved(world.link, votes, arguments.rounds, calls=50)
    after_compute_s = {
        name: after_compute(world, vote, arguments.rounds) for name, vote in votes.items()
    }
    rows = [
        {"study": study, "vote": name, "ranks": world.size, **summarize_times(seconds)}
        for study, by_name in (("back to back", back_to_back), ("after compute", after_compute_s))
        for name, seconds in by_name.items()
    ]
    back_to_back_us, after_compute_us = (
        1e6 * float(np.median(seconds["flags"])) for seconds in (back_to_back, after_compute_s)
    )
    claims = {
        f"a vote takes {back_to_back_us:.1f} us back to back, <= 20": back_to_back_us <= 20,
        f"a vote after 10 ms of compute takes {after_compute_us:.1f} us, <= 60": after_compute_us
        <= 60,
        f"it is {after_compute_us / COMPUTE_S / 1e4:.2f} % of such a step, < 1": after_compute_us
        < 1e4 * COMPUTE_S,
    }
    report_result(world, f"vote-{world.size}-ranks", rows, claims)


def after_compute(world: World, vote: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds from the last arrival to the last departure; one clock for all ranks."""
    durations = []
    for _ in range(rounds):
        compute(COMPUTE_S)
        times = [time.monotonic()]
        vote()
        times.append(time.monotonic())
        own_times = np.array(times).view(np.uint8)
        all_times = all_gather_short(world.link, own_times).view(np.float64)
        durations.append(float(all_times[:, 1].max() - all_times[:, 0].max()))
    return durations


def compute(seconds: float) -> None:
    """Multiply matrices for `seconds` of this process's own time."""
    a = np.ones((64, 64), np.float32)
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        a @ a


if __name__ == "__main__":
    main()
