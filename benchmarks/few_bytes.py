"""Claims at 4 bytes: a bound call has 0.85 of MPI's own speed, a plain call 0.7 of mpi4py's.

    python benchmarks/few_bytes.py [--ranks 2] [--rounds 60] [--sizes 4B,64B,1KiB,4KiB]

And the check of arguments adds at most 1 us to the plain call.

Where the nanoseconds of an all-reduce go that takes MPI less than a microsecond, in one interleaved
run, 64 calls between two looks at the clock:

    native          comm.Allreduce with all that it needs made before: a partial, as C calls it
    in a frame      the same from an empty Python function: what any Python around it costs at least
    in notes        the same between the two notes for the watch that every message makes
    noticed         the same in a frame by which the watch finds who stays in it, and with MPI's own
                    kind of memory, since of an array mpi4py asks shape and format in each call
    bound           user_collectives.calls.bind: that, unless the array has become read-only
    native-plain    comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM), as people type it, in a function
    plain           ht.allreduce(x, check=False), alike: finds the call that was made ready for x
    checked         ht.allreduce(x): the same, where ranks compare their calls, see checked.py
    chosen          algorithm `auto` as a function, which chooses anew in each call
"""

from __future__ import annotations

import os
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

import hpctrain as ht
from hpctrain.tools.bench import units
from hpctrain.tuning.select import auto
from hpctrain.world import World
from hpctrain.world.calls import calls as user_calls

CALLS = 64
CLAIMED_BYTES = 4


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=60)
    parser.add_argument("--sizes", default="4B,64B,1KiB,4KiB")
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    rows, claims = [], {}
    for nbytes in units.parse_sizes(arguments.sizes):
        calls = make_contenders(world, world.zeros(nbytes // 4))
        seconds = time_interleaved(world.link, calls, arguments.rounds, calls=CALLS)
        rows += make_rows(world, nbytes, seconds)
        if nbytes == CLAIMED_BYTES:
            claims = check_claims(seconds)
    load = os.getloadavg()[0]
    report_result(world, f"few-bytes-{world.size}-ranks", rows, claims, load=load)


def make_rows(
    world: World, nbytes: int, seconds: Mapping[str, list[float]]
) -> list[dict[str, Any]]:
    """Return a row of statistics for each contender."""
    native_s = float(np.median(seconds["native"]))
    return [
        {
            "call": name,
            "bytes": nbytes,
            "ranks": world.size,
            "ns": 1e9 * statistics["median_s"],
            "ns_over_native": 1e9 * (statistics["median_s"] - native_s),
            "times_native": median_ratio(seconds["native"], seconds[name]),
            **statistics,
            "min_s": min(seconds[name]),
        }
        for name, statistics in ((name, summarize_times(times)) for name, times in seconds.items())
    ]


def check_claims(seconds: Mapping[str, list[float]]) -> dict[str, bool]:
    """Return whether each claim holds, by its sentence."""
    bound_ratio = median_ratio(seconds["native"], seconds["bound"])
    plain_ratio = median_ratio(seconds["native-plain"], seconds["plain"])
    check_us = 1e6 * float(np.median(np.subtract(seconds["checked"], seconds["plain"])))
    return {
        f"a bound call has {bound_ratio:.2f} of the speed of MPI's own, >= 0.85": bound_ratio
        >= 0.85,
        f"a plain call has {plain_ratio:.2f} of the speed of mpi4py's, >= 0.7": plain_ratio >= 0.7,
        f"the check of arguments adds {check_us:.2f} us, <= 1": check_us <= 1,
    }


def make_contenders(world: World, x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return the calls, all of MPI's own all-reduce of `x` unless `auto` takes another."""
    link = world.link
    native_call = link.endpoint.native.bind("allreduce", x, np.add).call
    return {
        "native": native_call,
        "in a frame": lambda: native_call(),
        "in notes": partial(call_with_notes, world, native_call, x.nbytes),
        "noticed": link.endpoint.native.bind_allreduce(x, np.add),
        "bound": user_calls.bind(x, algorithm="native", world=world),
        "native-plain": link.endpoint.native.bind("allreduce plain", x, np.add).call,
        "plain": lambda: ht.allreduce(x, check=False),
        "checked": lambda: ht.allreduce(x),
        "chosen": partial(auto, world.main, x, np.add),
    }


def call_with_notes(world: World, call: Callable[[], Any], nbytes: int) -> None:
    """Make a call with a note in the watch's record before and after it."""
    entry = world.link.endpoint.waits.entry
    entry.enter(b"MPI_Allreduce", -1, nbytes)
    call()
    entry.leave()


if __name__ == "__main__":
    main()
