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
from _common import options, paired_ratio, spread, world_of, write

from hpctrain import optim
from hpctrain.engines.parameter_server.shard import (
    POSTED_SLICES,
    GradientAction,
    Order,
    Shard,
    wire_slices,
)
from hpctrain.gradients import arena as arenas
from hpctrain.transport.link import Link
from hpctrain.world import World

BYTES, RATE, BLOCK = 40 << 20, 1e-3, 65_536
REST_S = 0.12  # workers sleep while the server works alone: there may be fewer cores than ranks


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(ranks=3)
    arguments = parser.parse_args()
    world = world_of(arguments.ranks)
    workers = world.size - 1
    seconds = measured(world, arguments.rounds)
    ratio = paired_ratio(seconds["memory"], seconds["push"])
    rows = [
        {"what": what, "workers": workers, "bytes": amount(what, workers), **spread(times),
         "GB_per_s": amount(what, workers) / float(np.median(times)) / 1e9}
        for what, times in seconds.items()
    ]  # fmt: skip
    claims = {f"pushes are applied at {ratio:.2f} of the speed of memory, >= 0.5": ratio >= 0.5}
    write(world, f"server-{workers}-workers", rows, claims if workers == 2 else {}, ratio=ratio)


def amount(what: str, workers: int) -> int:
    """Return the bytes of gradients that are applied, or merely sent."""
    return BYTES if what == "one way" else BYTES * workers


def measured(world: World, rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Return the server's seconds for each way, taken in turn."""
    link, everyone = world.link, tuple(range(world.size - 1))
    push, pull = world.link_for("push"), world.link_for("pull")
    arena = arenas.make_arena({"w": (BYTES // 4,)}, "float32")
    arena.grad[:] = 1
    own, ranks = slice(0, arena.param.size), [w + 1 for w in everyone]
    sgd = optim.sgd(RATE)
    shard = Shard(
        arena, own, sgd, gather_rows=np.asarray, push_link=push, pull_link=pull, workers=ranks
    )
    one_by_one = [(w,) for w in everyone]
    ways = {
        "memory": (lambda: in_memory(arena, len(everyone)), lambda: time.sleep(REST_S)),
        "one way": (lambda: receive(push, arena.grad), lambda: send(link, push, arena, False)),
        "push": (lambda: serve(shard, one_by_one, False), lambda: send(link, push, arena)),
        "push, pull": (
            lambda: serve(shard, one_by_one, True), lambda: exchange(push, pull, arena)
        ),
        "sum": (lambda: serve(shard, [everyone], False), lambda: send(link, push, arena)),
        "sum, pull": (
            lambda: serve(shard, [everyone], True), lambda: exchange(push, pull, arena)
        ),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    for round_ in range(warm_up + rounds):
        for what, (serving, working) in ways.items():
            link.barrier()
            start = time.perf_counter()
            (working if link.rank else serving)()
            if round_ >= warm_up:
                seconds[what].append(time.perf_counter() - start)
    return seconds


def in_memory(arena: arenas.Arena, times: int) -> None:
    """Do `w -= r * g` for as many gradients, in blocks."""
    scratch = np.empty(BLOCK, np.float32)
    for _ in range(times):
        for i in range(0, arena.param.size, BLOCK):
            w, g = arena.param[i : i + BLOCK], arena.grad[i : i + BLOCK]
            w -= np.multiply(g, RATE, out=scratch[: w.size])


def serve(shard: Shard, pushes: list[tuple[int, ...]], pull: bool) -> None:
    """Apply pushes, each of some workers together."""
    for who in pushes:
        shard.apply(Order(who, GradientAction.UPDATE, 1.0, who if pull else (), False))
    shard.flush()


def send(link: Link, push: Link, arena: arenas.Arena, all_of_us: bool = True) -> None:
    """Push a gradient in slices; of all workers, or of the first alone."""
    if link.rank == 1 or all_of_us:
        cut = wire_slices(slice(0, arena.grad.size), 4)
        for request in [push.isend(arena.grad[s], 0) for s in cut]:
            request.wait()


def exchange(push: Link, pull: Link, arena: arenas.Arena) -> None:
    """Push a gradient and pull the parameters."""
    cut = wire_slices(slice(0, arena.grad.size), 4)
    receives = [pull.irecv(arena.param[s], 0) for s in cut]
    sends = [push.isend(arena.grad[s], 0) for s in cut]
    for request in [*receives, *sends]:
        request.wait()


def receive(push: Link, into: np.ndarray) -> None:
    """Take what the first worker sends, with as many receives ahead as a shard has."""
    posted: list = []
    for s in wire_slices(slice(0, into.size), 4):
        posted.append(push.irecv(into[s], 1))
        if len(posted) == POSTED_SLICES:
            posted.pop(0).wait()
    for request in posted:
        request.wait()


if __name__ == "__main__":
    main()
