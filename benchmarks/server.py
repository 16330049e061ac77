"""Claim: a server applies what two workers push at half the speed of memory, or faster.

    python benchmarks/server.py [--ranks 3] [--rounds 30]

Rank 0 serves the others. Each pushes a gradient of 40 MiB (float32, slices of 1 MiB), which
the server applies by plain SGD; in turn with that the server alone does the same in its memory,
`w -= r * g` in blocks that stay in the cache, and one worker sends as much that nobody applies.

- `push`: the gradients of all workers come and are applied one after the other
- `push, pull`: each worker gets the parameters back, while its gradient is still on the way
- `sum`: the gradients of all workers are added first (ps-sync), without and with pulls
"""

from __future__ import annotations

import time

import numpy as np
from lib.common import make_parser, median_ratio, report_result, start_world, summarize_times

from hpctrain import optim
from hpctrain.engines.parameter_server.shard import (
    RECEIVES_AHEAD,
    GradientAction,
    Order,
    Shard,
    wire_slices,
)
from hpctrain.gradients import arena as arenas
from hpctrain.transport.link import Link
from hpctrain.world import World

BYTES, LEARNING_RATE, BLOCK = 40 << 20, 1e-3, 65_536
IDLE_S = 0.12  # workers sleep while the server works alone: there may be fewer cores than ranks


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(ranks=3)
    arguments = parser.parse_args()
    world = start_world(arguments.ranks)
    workers = world.size - 1
    seconds = measure_cases(world, arguments.rounds)
    ratio = median_ratio(seconds["memory"], seconds["push"])
    rows = [
        {"what": case, "workers": workers, "bytes": bytes_moved(case, workers),
         **summarize_times(count),
         "GB_per_s": bytes_moved(case, workers) / float(np.median(count)) / 1e9}
        for case, count in seconds.items()
    ]  # fmt: skip
    claims = {f"pushes are applied at {ratio:.2f} of the speed of memory, >= 0.5": ratio >= 0.5}
    report_result(
        world, f"server-{workers}-workers", rows, claims if workers == 2 else {}, ratio=ratio
    )


def bytes_moved(case: str, workers: int) -> int:
    """Return the bytes of gradients that are applied, or merely sent."""
    return BYTES if case == "one way" else BYTES * workers


def measure_cases(world: World, rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Return the server's seconds for each way, taken in turn."""
    link, all_workers = world.link, tuple(range(world.size - 1))
    push, pull = world.threads.link_for("push"), world.threads.link_for("pull")
    arena = arenas.make_arena({"w": (BYTES // 4,)}, "float32")
    arena.grad[:] = 1
    own_range, ranks = slice(0, arena.param.size), [w + 1 for w in all_workers]
    sgd = optim.sgd(LEARNING_RATE)
    shard = Shard(
        arena,
        own_range,
        sgd,
        gather_rows=np.asarray,
        push_link=push,
        pull_link=pull,
        workers=ranks,
    )
    single_workers = [(w,) for w in all_workers]
    together = [all_workers]
    cases = {
        "memory": (lambda: update_in_memory(arena, len(all_workers)), lambda: time.sleep(IDLE_S)),
        "one way": (
            lambda: receive_gradient(push, arena.grad),
            lambda: push_gradient(link, push, arena, False),
        ),
        "push": (
            lambda: apply_pushes(shard, single_workers, False),
            lambda: push_gradient(link, push, arena),
        ),
        "push, pull": (
            lambda: apply_pushes(shard, single_workers, True),
            lambda: push_and_pull(push, pull, arena),
        ),
        "sum": (
            lambda: apply_pushes(shard, together, False),
            lambda: push_gradient(link, push, arena),
        ),
        "sum, pull": (
            lambda: apply_pushes(shard, together, True),
            lambda: push_and_pull(push, pull, arena),
        ),
    }
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for round_number in range(warm_up + rounds):
        for case, (server_call, worker_call) in cases.items():
            link.barrier()
            start = time.perf_counter()
            (worker_call if link.rank else server_call)()
            if round_number >= warm_up:
                seconds[case].append(time.perf_counter() - start)
    return seconds


def update_in_memory(arena: arenas.Arena, count: int) -> None:
    """Do `w -= r * g` for as many gradients, in blocks."""
    scratch = np.empty(BLOCK, np.float32)
    for _ in range(count):
        for i in range(0, arena.param.size, BLOCK):
            w, g = arena.param[i : i + BLOCK], arena.grad[i : i + BLOCK]
            w -= np.multiply(g, LEARNING_RATE, out=scratch[: w.size])


def apply_pushes(shard: Shard, pushes: list[tuple[int, ...]], pull: bool) -> None:
    """Apply pushes, each of some workers together."""
    for who in pushes:
        shard.apply(Order(who, GradientAction.UPDATE, 1.0, who if pull else (), False))
    shard.flush()


def push_gradient(link: Link, push: Link, arena: arenas.Arena, all_push: bool = True) -> None:
    """Push a gradient in slices; of all workers, or of the first alone."""
    if link.rank == 1 or all_push:
        ranges = wire_slices(slice(0, arena.grad.size), 4)
        for request in [push.isend(arena.grad[part], 0) for part in ranges]:
            request.wait()


def push_and_pull(push: Link, pull: Link, arena: arenas.Arena) -> None:
    """Push a gradient and pull the parameters."""
    ranges = wire_slices(slice(0, arena.grad.size), 4)
    receives = [pull.irecv(arena.param[part], 0) for part in ranges]
    sends = [push.isend(arena.grad[part], 0) for part in ranges]
    for request in [*receives, *sends]:
        request.wait()


def receive_gradient(push: Link, buffer: np.ndarray) -> None:
    """Take what the first worker sends, with as many receives ahead as a shard has."""
    requests: list = []
    for part in wire_slices(slice(0, buffer.size), 4):
        requests.append(push.irecv(buffer[part], 1))
        if len(requests) == RECEIVES_AHEAD:
            requests.pop(0).wait()
    for request in requests:
        request.wait()


if __name__ == "__main__":
    main()
