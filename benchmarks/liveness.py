"""Claim: to observe whether ranks and hosts are alive takes at most 0.5 % of a step of 10 ms.

    python benchmarks/liveness.py [--ranks 4] [--rounds 30]

All ranks of one node train steps of 10 ms (a product of matrices, then a vote) in blocks that
alternate with and without the observer (hpctrain/watch/liveness/). Its share is the CPU time of its
thread over the time of the block: with more ranks than cores, the times of whole blocks differ by
more than what is to be measured. They are reported beside it, as a ratio of medians. In
`hpctrain netlab --hosts 2 --ranks-per-host 2 -- python benchmarks/liveness.py` the first ranks of
the hosts also send and receive the datagrams of the ring.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import numpy as np
from lib.common import make_parser, report_result, start_world

from hpctrain import collectives
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.watch.liveness import Identities, LivenessObserver, LossReports, observe_liveness
from hpctrain.world import World

COMPUTE_S, BLOCK_STEPS, SHARE = 0.01, 100, 0.005


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(ranks=4, rounds=30)
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    compute, steps_s, shares = make_compute(), {"with": [], "without": []}, []
    for _ in range(arguments.rounds):
        observer = start_observer(world)
        begin_s, begin_cpu_s = time.monotonic(), thread_cpu_s(observer)
        steps_s["with"] += run_block(world, compute)
        shares.append((thread_cpu_s(observer) - begin_cpu_s) / (time.monotonic() - begin_s))
        observer.stop()
        steps_s["without"] += run_block(world, compute)
    ratio = median(steps_s["with"]) / median(steps_s["without"])
    all_shares = [float(text) for text in world.gather(str(median(shares)))]
    rows = [
        {"ranks": world.size, "rank": rank, "share_of_cpu": share}
        for rank, share in enumerate(all_shares)
    ] + [{"ranks": world.size, "step_with_s": median(steps_s["with"]), "step_ratio": ratio}]
    worst = max(all_shares)
    claims = {
        f"the observer takes {100 * worst:.3f} % of the time of a rank, <= 0.5 "
        f"(steps with and without it: {ratio:.4f})": worst <= SHARE
    }
    report_result(world, f"liveness-{world.size}-ranks", rows, claims)


def start_observer(world: World) -> LivenessObserver:
    gather = partial(collectives.all_gather_bytes, world.link)
    ignore = LossReports(lambda *_: None, lambda *_: None, lambda *_: None)
    identities = Identities.exchange(world.rank, world.hosts, gather)
    return observe_liveness(
        world.threads.record, world.rank, world.hosts, identities, gather, lambda: 0, ignore
    )


def make_compute():
    """Return a function that computes for about COMPUTE_S on one core."""
    x, products = np.ones((128, 128), np.float32), 1
    begin_s = time.thread_time()
    for _ in range(200):
        x @ x
    products = max(1, round(200 * COMPUTE_S / (time.thread_time() - begin_s)))

    def compute() -> None:
        for _ in range(products):
            x @ x

    return compute


def run_block(world: World, compute) -> list[float]:
    times_s = []
    world.barrier()
    for _ in range(BLOCK_STEPS):
        begin_s = time.perf_counter()
        compute()
        elementwise_maximum(world.main, (0, 1))
        times_s.append(time.perf_counter() - begin_s)
    return times_s


def thread_cpu_s(observer: LivenessObserver) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(observer._thread.ident))


if __name__ == "__main__":
    main()
