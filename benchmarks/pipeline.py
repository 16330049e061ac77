"""Claims: a step of a pipeline takes what its clock says. Stages that sleep, in place of computing,
within 3 % for each schedule, and `zb-h1` <= 0.85 of `1f1b` on 4 ranks; 2 ranks that compute within
10 % of the clock fed with the measured costs of their actions; on hosts at 1 Gbit/s, with the
LogGP wire fitted to single messages, within 10 % for stages that sleep and 15 % for a transformer.

    python benchmarks/pipeline.py sleep --ranks 2|4              MPI ranks, 2P micro-batches
    python benchmarks/pipeline.py sleep --threads                2, 4 and 8 ranks that are threads
    python benchmarks/pipeline.py compute                        2 ranks
    python benchmarks/pipeline.py hosts --ranks 2|4 [--link 1gbit]
    python benchmarks/plots/pipeline.py

Costs of actions are measured without messages, on all ranks at once, before each step: so they are
those of ranks that share cores, as 4 hosts on a machine with 2 cores do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from lib.common import report_result, save_result, start_world, time_interleaved
from lib.pipelines import (
    KEY,
    WIDTH,
    CoreShare,
    Row,
    action_times,
    clock_seconds,
    compared,
    conditions,
    make_replica,
    min_over_ranks,
    pipe_mesh,
    pylm_model,
    sleeping_step,
    stage_costs,
    texts,
)
from predict import both_ways, message_times, one_way, send_overhead, there_and_back

from hpctrain import world as worlds
from hpctrain.cluster.netlab.netlab import Lab, netlab, parse_speed
from hpctrain.core import launchers
from hpctrain.gradients.replica import ignore_ready
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.schedules import SCHEDULES, make
from hpctrain.parallel.timing.clock import FREE_WIRE, run_clock, uniform_costs
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.tuning.measure import time_calls
from hpctrain.tuning.model import fit
from hpctrain.tuning.model.loggp import Wire
from hpctrain.world import World

COMPUTED = ("gpipe", "1f1b", "zb-h1", "interleaved")
UNIT_S = {2: 0.05, 4: 0.05, 8: 0.05}  #: by ranks: F of a rank's share, and I, and W
HOST_UNIT_S = 0.04  #: a message of 512 KiB takes 4 ms at 1 Gbit/s
LIMITS = {"sleep": 0.03, "compute": 0.10, "hosts": 0.10, "transformer": 0.15}
SAMPLES = 4  #: texts of a micro-batch
#: A round in which a rank had less than this share of a core, since other processes of the machine
#: ran, does not count; there are at most so many times as many of them.
MIN_CORE_SHARE, MAX_DISTURBED = 0.95, 5


def main() -> int:
    options = parse_arguments()
    if options.study == "hosts" and launchers.launched(os.environ).size == 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # hosts share the cores of this machine
        lab = Lab(options.ranks, 1, parse_speed(options.link))
        return netlab(lab, [sys.executable, *sys.argv])
    if options.threads:
        return sleep_in_threads(options.rounds)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    world = start_world(options.ranks)
    {"sleep": measure_sleep, "compute": measure_compute, "hosts": measure_hosts}[options.study](
        world, options
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("study", choices=["sleep", "compute", "hosts"], nargs="?", default="sleep")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--threads", action="store_true")
    return parser.parse_args()


def sleep_in_threads(rounds: int) -> int:
    """Measure sleeping stages on ranks that are threads; return the exit code."""

    def measure(link: Any) -> Any:
        world = worlds.over_threads(link)
        return conditions(world), sleep_rows(world, rounds)

    results = [run_ranks(ranks, measure, timeout_s=120)[0] for ranks in UNIT_S]
    rows = [row for _, part in results for row in part]
    claims = bubble_claims(rows)
    about = {**results[0][0], "unit_s": UNIT_S}
    about["machine"]["mpi"] = "threads 1"
    save_result("pipeline-sleep", about, rows, claims)
    return 0 if all(claims.values()) else 1


def measure_sleep(world: World, options: argparse.Namespace) -> None:
    about, rows = conditions(world), sleep_rows(world, options.rounds)
    report_result(
        world, f"pipeline-sleep-{world.size}-ranks", rows, bubble_claims(rows),
        **without_machine(about), unit_s=UNIT_S[world.size],
    )  # fmt: skip


def without_machine(about: Row) -> Row:
    return {key: value for key, value in about.items() if key != "machine"}


def sleep_rows(
    world: World, rounds: int, wire: Wire = FREE_WIRE, unit_s: float = 0.0, shape: Any = (1,)
) -> list[Row]:
    """Return a row per schedule, of 2P micro-batches on stages that sleep."""
    ranks = world.size
    micro_batches, unit_s, mesh = 2 * ranks, unit_s or UNIT_S[ranks], pipe_mesh(world)
    steps = {name: sleeping_step(mesh, name, micro_batches, unit_s, shape) for name in SCHEDULES}
    seconds = time_interleaved(world.link, steps, rounds, warm_up=1)
    nbytes = 4 * int(np.prod(shape))
    rows = []
    for name, times in seconds.items():
        schedule = make(name, ranks, micro_batches)
        costs = uniform_costs(schedule, unit_s, unit_s, unit_s)
        clock = run_clock(schedule, costs, wire, nbytes).makespan
        rows.append(
            compared(times, [clock], what="sleep", schedule=name, ranks=ranks, micro=micro_batches)
        )
    return rows


def bubble_claims(rows: list[Row]) -> dict[str, bool]:
    claims = {
        f"{row['schedule']} on {row['ranks']} ranks takes {row['to_clock']:.3f} of its clock, "
        "within 3 %": abs(row["to_clock"] - 1) <= LIMITS["sleep"]
        for row in rows
    }
    medians = {row["schedule"]: row["median_s"] for row in rows if row["ranks"] == 4}
    if medians:
        ratio = medians["zb-h1"] / medians["1f1b"]
        claims[f"zb-h1 takes {ratio:.3f} of 1f1b's step on 4 ranks, <= 0.85"] = ratio <= 0.85
    return claims


def measure_compute(world: World, options: argparse.Namespace) -> None:
    """Compare steps of a transformer with the clock; all in turn."""
    about, mesh = conditions(world), pipe_mesh(world)
    rows = [
        row
        for micro_batches in (4, 8, 16)
        for row in compute_rows(world, mesh, micro_batches, options.rounds, FREE_WIRE, spins=True)
    ]
    claims = clock_claims(rows, LIMITS["compute"])
    claims["all schedules were measured undisturbed"] = len(rows) == 3 * len(COMPUTED)
    report_result(world, "pipeline-compute-2-ranks", rows, claims, **without_machine(about))


def compute_rows(
    world: World, mesh: Mesh, micro_batches: int, rounds: int, wire: Wire, spins: bool
) -> Iterator[Row]:
    """Yield a row per schedule: a step of pylm, and the clock with costs measured beside it.

    `spins`: ranks that wait do not sleep, so that a rank without a core all the time was disturbed.
    """
    model, batch = pylm_model(), texts(SAMPLES * micro_batches)
    for name in COMPUTED:
        if name == "interleaved" and make(name, world.size, micro_batches).stages > 6:
            continue  # pylm has fewer layers with parameters
        replica = make_replica(mesh, model, name, micro_batches)
        step = partial(replica.gradient, batch, 1.0, KEY, ignore_ready)
        seconds, clocks, disturbed = [], [], -1  # the first round warms up
        while len(seconds) < rounds and disturbed < MAX_DISTURBED * rounds:
            with CoreShare() as share:
                costs = stage_costs(world, action_times(replica, batch), replica.plan.stages)
                elapsed = time_calls(world.link, step)
            if disturbed < 0 or (spins and min_over_ranks(world, share.value) < MIN_CORE_SHARE):
                disturbed += 1
            else:
                seconds.append(elapsed)
                clocks.append(clock_seconds(replica, costs, SAMPLES, wire))
        if not seconds:
            continue  # the claim that everything was measured fails
        yield compared(
            seconds, clocks, what="transformer", schedule=name, ranks=world.size,
            micro=micro_batches, bounds=replica.plan.bounds, costs=vars(costs),
            rounds=len(seconds), disturbed=disturbed,
        )  # fmt: skip


def clock_claims(rows: list[Row], limit: float) -> dict[str, bool]:
    return {
        f"{row['what']}, {row['schedule']}, M = {row['micro']}, {row['ranks']} ranks: "
        f"{row['to_clock']:.3f} of the clock, within {limit:.0%}": abs(row["to_clock"] - 1) <= limit
        for row in rows
    }


def measure_hosts(world: World, options: argparse.Namespace) -> None:
    """Compare stages that sleep, and a transformer, with the clock that has the fitted wire."""
    about, mesh = conditions(world), pipe_mesh(world)
    patterns = (one_way, there_and_back, both_ways)
    messages = [message_times(world.link, pattern, options.rounds) for pattern in patterns]
    wire = fit.fit_wire(*messages, send_overhead(world.link, options.rounds))
    shape = (SAMPLES * pylm_model().shapes[1][0], WIDTH)
    sleeping = sleep_rows(world, options.rounds, wire, HOST_UNIT_S, shape)
    computing = list(compute_rows(world, mesh, 8, options.rounds, wire, spins=False))
    claims = clock_claims(sleeping, LIMITS["hosts"])
    claims |= clock_claims(computing, LIMITS["transformer"])
    name = f"pipeline-hosts-{world.size}"
    facts = {**without_machine(about), "link": options.link, "wire": vars(wire)}
    report_result(world, name, [*sleeping, *computing], claims, unit_s=HOST_UNIT_S, **facts)


if __name__ == "__main__":
    sys.exit(main())
