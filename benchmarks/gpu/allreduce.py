"""Claims: on one node `direct` sums GPUs' arrays without the host, at the speed of GPU memory.

    python benchmarks/gpu/allreduce.py [--ranks 2] [--sizes 1048576,67108864,536870912]

float32, the slowest rank's time, contenders taken in turn: `direct` in place and with one result
for all, the ring through pinned host memory, and by pointers where a trial went well. Beside them
what they are held against: rank 0's GPU copying n bytes alone, and an exchange of flags. What it
costs that ranks share a GPU: a kernel of rank 0 alone, and one of each rank at once.

At the longest size: `direct` >= 10 times the staged ring; where all ranks share one GPU, one result
for all moves its (P + 1) n bytes at >= half the speed of that copy; no byte visits the host.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from lib.common import RESULTS, machine_facts, summarize_times, time_interleaved
from lib.outcomes import print_claims, save_result

from hpctrain.cluster.launch import launch_program
from hpctrain.collectives import Group
from hpctrain.collectives.direct import direct, direct_shared
from hpctrain.collectives.ring import ring
from hpctrain.core import launchers, xp
from hpctrain.transport.device import gpus
from hpctrain.transport.paths import POINTER_PATHS
from hpctrain.world import World, init

SIZES = "1048576,67108864,536870912"
MIN_SPEED_UP, MIN_COPY_SHARE = 10, 0.5
Calls = Mapping[str, Callable[[], Any]]


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=SIZES, help="bytes, a list")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu" / "allreduce.json")
    options = parser.parse_args()
    if launchers.launched(os.environ).size == 1:
        sys.exit(launch_program(options.ranks, [sys.executable, *sys.argv]))
    world = init("gpu")
    groups = {"staged": staged_group(world), "by pointer": pointer_group(world)}
    sizes = [int(word) for word in options.sizes.split(",")]
    rows = [row for n in sizes for row in measure_size(world, groups, n, options.rounds)]
    claims = check_claims(world, [row for row in rows if row["bytes"] == max(sizes)])
    if world.rank == 0:
        about = {
            "machine": machine_facts(world),
            "device": world.device,
            "one_gpu": ranks_share_gpu(world),
        }
        save_result(options.json, about, claims, rows)
        print_claims(claims)
    sys.exit(False in claims.values())


def measure_size(
    world: World, groups: Mapping[str, Group | None], nbytes: int, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for each contender at this size."""
    gpu_memory = world.memory.gpu
    x = (
        gpu_memory.zeros(nbytes // 4, np.float32)
        if gpu_memory
        else gpus.import_cupy().zeros(nbytes // 4, "f4")
    )
    calls = make_contenders(world, groups, x)
    correct_by_name = {name: is_correct(world, x, call) for name, call in calls.items()}
    bytes_before = {name: group_for(world, groups, name).host_bytes for name in calls}
    for call in calls.values():
        call()
    copied_bytes = {
        name: group_for(world, groups, name).host_bytes - n for name, n in bytes_before.items()
    }
    x.fill(0)
    y = gpus.import_cupy().empty_like(x)
    short_array = y[:1024]
    kernel = partial(run_and_wait, short_array, partial(short_array.fill, 1))
    references: Calls = {
        "copy": on_rank_0(world, partial(run_and_wait, y, partial(xp.copy, y, x))),
        "flags": flag_exchange(world),
        "a kernel alone": on_rank_0(world, kernel),
        "a kernel of each": kernel,
    }
    seconds = time_interleaved(world.link, {**calls, **references}, rounds)
    size_columns = {"bytes": nbytes, "ranks": world.size}
    return [
        {**size_columns, "what": name, **summarize_times(durations),
         "right": correct_by_name.get(name, True), "host_bytes": copied_bytes.get(name, 0)}
        for name, durations in seconds.items()
    ]  # fmt: skip


def make_contenders(world: World, groups: Mapping[str, Group | None], x: xp.Array) -> Calls:
    """Return a call for each algorithm, after which the sum is there on this rank's GPU."""
    calls: dict[str, Callable[[], Any]] = {
        "direct": partial(run_and_wait, x, partial(direct, world.main, x, np.add)),
        "direct, one result": partial(
            run_and_wait, x, partial(direct_shared, world.main, x, np.add)
        ),
    }
    for name, group in groups.items():
        if group is not None:
            calls[f"ring {name}"] = partial(run_and_wait, x, partial(ring, group, x, np.add))
    return calls


def run_and_wait(x: xp.Array, work: Callable[[], Any]) -> Any:
    """Return what `work` does once it is done."""
    result = work()
    xp.finish(x)
    return result


def group_for(world: World, groups: Mapping[str, Group | None], name: str) -> Group:
    return groups.get(name.removeprefix("ring ")) or world.main


def staged_group(world: World) -> Group:
    """Return a group in which GPUs' arrays go through pinned memory of the host."""
    group = world.threads.group_for("staged")
    for link in group.links:
        link.endpoint.traffic.set_paths(["staged"] * link.size)
    return group


def pointer_group(world: World) -> Group | None:
    """Return a group in which MPI is given pointers to GPU memory, if it may be everywhere."""
    return (
        world.main
        if all(path in POINTER_PATHS for path in world.link.endpoint.traffic.paths)
        else None
    )


def ranks_share_gpu(world: World) -> bool:
    return len(set(world.places)) == 1


def is_correct(world: World, x: xp.Array, call: Callable[[], Any]) -> bool:
    """Return whether `call` sums what the ranks have, on all ranks; small integers are exact."""
    library = xp.namespace(x)
    base = library.arange(x.size, dtype=np.float32) % 7
    x[...] = base + world.rank
    result = call()
    summed = xp.to_host(x if result is None else result)
    total = xp.to_host(base) * world.size + world.size * (world.size - 1) // 2
    is_own_correct = bool((summed == total).all())
    return all(vote == "y" for vote in world.gather("y" if is_own_correct else "n"))


def on_rank_0(world: World, work: Callable[[], Any]) -> Callable[[], Any]:
    """Return `work` for rank 0, and for others what does nothing."""
    return work if world.rank == 0 else lambda: None


def flag_exchange(world: World) -> Callable[[], Any]:
    """Return an exchange of flags of the node, or a barrier where it has none."""
    node_buffers = world.main.node_buffers
    return world.link.barrier if node_buffers is None else node_buffers.flags.agree


def check_claims(world: World, rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return what is claimed of the longest size, and whether it holds."""
    row_by_name = {row["what"]: row for row in rows}
    mib, ranks = rows[0]["bytes"] >> 20, world.size
    speed_up = row_by_name["ring staged"]["median_s"] / row_by_name["direct"]["median_s"]
    found = {
        f"{ranks} ranks, {mib} MiB: direct is {speed_up:.1f} times the staged ring, "
        f">= {MIN_SPEED_UP}": (speed_up >= MIN_SPEED_UP),
        "all sums are right": all(row["right"] for row in rows),
        "direct copies no byte to or from the host": (
            row_by_name["direct"]["host_bytes"]
            == row_by_name["direct, one result"]["host_bytes"]
            == 0
        ),
    }
    if ranks_share_gpu(world):
        copied_bytes = 2 * rows[0]["bytes"] / row_by_name["copy"]["median_s"]
        bytes_per_s = (ranks + 1) * rows[0]["bytes"] / row_by_name["direct, one result"]["median_s"]
        share = bytes_per_s / copied_bytes
        found[f"one result for all moves {bytes_per_s / 1e9:.0f} GB/s, {share:.2f} of a copy's, >= "
              f"{MIN_COPY_SHARE}"] = share >= MIN_COPY_SHARE  # fmt: skip
    return found


if __name__ == "__main__":
    main()
