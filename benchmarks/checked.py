"""Claim: comparing the arguments of `ht.allreduce` on all ranks adds at most 1.5 us to 4 bytes.

    python benchmarks/checked.py [--ranks 2] [--rounds 200] [--sizes 4B,1KiB,16KiB,128KiB,1MiB]

The plain call as people type it, with its check (the default) and with check=False, beside MPI's
own, bound; on the same array in node memory and in turn, A B C A B C:

    hot     calls back to back, 64 up to 16 KiB, 1 from 1 MiB on: arrays lie in the caches
    cold    one call after a barrier, before which each rank has written 8 MiB of other arrays

The cost of the check is the median over rounds of checked minus unchecked, neighbours in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from lib.common import make_parser, report_result, start_world, summarize_times, time_interleaved

import hpctrain as ht
from hpctrain.tools.bench import units
from hpctrain.tools.bench.sweep import calls_per_round
from hpctrain.tuning.measure import COLD_BYTES
from hpctrain.world import World

MAX_CHECK_S = 1.5e-6
CLAIMED_BYTES = 4  # bytes
CONTENDERS = ("checked", "unchecked", "native")


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(rounds=200)
    parser.add_argument("--sizes", default="4B,1KiB,16KiB,128KiB,1MiB")
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    x = world.zeros(1 << 20)
    rows, claims = [], {}
    for nbytes in units.parse_sizes(arguments.sizes):
        for caches in ("hot", "cold"):
            case_rows = measure_contenders(world, x[: nbytes // 4], caches, arguments.rounds)
            rows += case_rows
            check_s = case_rows[0]["check_s"]
            if nbytes == CLAIMED_BYTES:
                claim = f"{nbytes} B, {caches}: the check adds {check_s * 1e6:.2f} us, <= 1.5"
                claims[claim] = check_s <= MAX_CHECK_S
    report_result(world, f"checked-{world.size}-ranks", rows, claims)


def measure_contenders(
    world: World, x: np.ndarray, caches: str, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each contender on `x`."""
    contenders = {
        "checked": lambda: ht.allreduce(x),
        "unchecked": lambda: ht.allreduce(x, check=False),
        "native": world.link.endpoint.native.bind("allreduce", x, np.add).call,
    }
    around = {name: partial(warm_up_call, call) for name, call in contenders.items()}
    measure = partial(time_interleaved, world.link, contenders, rounds, contexts=around)
    if caches == "hot":
        seconds = measure(calls=calls_per_round(x.nbytes))
    else:
        seconds = measure(eviction_array=np.zeros(COLD_BYTES // 4, np.float32))
    check_s = float(np.median(np.subtract(seconds["checked"], seconds["unchecked"])))
    return [
        {
            "call": name,
            "bytes": x.nbytes,
            "caches": caches,
            "ranks": world.size,
            **summarize_times(seconds[name]),
            "check_s": check_s if name == "checked" else None,
        }
        for name in CONTENDERS
    ]


@contextmanager
def warm_up_call(call: Callable[[], Any]) -> Iterator[None]:
    """Be timed after a call that does not count: the caches hold what another has left."""
    call()
    yield


if __name__ == "__main__":
    main()
