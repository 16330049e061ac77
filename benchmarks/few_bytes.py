"""Claims: at few bytes a bound call is 0.8 times as fast as MPI's own, a plain one 0.7 mpi4py's.

    python benchmarks/few_bytes.py [--ranks 2] [--rounds 60] [--bytes 4]

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
    checked         ht.allreduce(x): that after an exchange of digests, see checked.py
    chosen          algorithm `auto` as a function, which chooses anew in each call
"""

from __future__ import annotations

from collections.abc import Callable
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
from hpctrain.tuning.select import auto
from hpctrain.world import World
from hpctrain.world.calls import calls as user_calls

CALLS = 64


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=60)
    parser.add_argument("--bytes", type=int, default=4)
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    calls = make_contenders(world, world.zeros(max(1, arguments.bytes // 4)))
    seconds = time_interleaved(world.link, calls, arguments.rounds, calls=CALLS)
    native_s = float(np.median(seconds["native"]))
    rows = [
        {
            "call": name,
            "bytes": arguments.bytes,
            "ranks": world.size,
            "ns": 1e9 * statistics["median_s"],
            "ns_over_native": 1e9 * (statistics["median_s"] - native_s),
            "times_native": median_ratio(seconds["native"], seconds[name]),
            **statistics,
        }
        for name, statistics in ((name, summarize_times(times)) for name, times in seconds.items())
    ]
    bound_ratio = median_ratio(seconds["native"], seconds["bound"])
    plain_ratio = median_ratio(seconds["native-plain"], seconds["plain"])
    claims = {
        f"a bound call is {bound_ratio:.2f} times as fast as MPI's own bound, >= 0.8": bound_ratio
        >= 0.8,
        f"a plain call is {plain_ratio:.2f} times as fast as mpi4py's plain, >= 0.7": plain_ratio
        >= 0.7,
    }
    report_result(world, f"few-bytes-{world.size}-ranks", rows, claims)


def make_contenders(world: World, x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return the calls, all of MPI's own all-reduce of `x` unless `auto` takes another."""
    link = world.link
    native_call = link.native.bind("allreduce", x, np.add).call
    return {
        "native": native_call,
        "in a frame": lambda: native_call(),
        "in notes": partial(call_with_notes, world, native_call, x.nbytes),
        "noticed": link.native.bind_allreduce(x, np.add),
        "bound": user_calls.bind(x, algorithm="native", world=world),
        "native-plain": link.native.bind("allreduce plain", x, np.add).call,
        "plain": lambda: ht.allreduce(x, check=False),
        "checked": lambda: ht.allreduce(x),
        "chosen": partial(auto, world.main, x, np.add),
    }


def call_with_notes(world: World, call: Callable[[], Any], nbytes: int) -> None:
    """Make a call with a note in the watch's record before and after it."""
    entry = world.link.entry  # type: ignore[attr-defined]
    entry.enter(b"MPI_Allreduce", -1, nbytes)
    call()
    entry.leave()


if __name__ == "__main__":
    main()
