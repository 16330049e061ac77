"""One test body on both kinds of ranks: threads of this process, or the MPI ranks of this job.

    @on_ranks(1, 2, 3)
    def test_sum(world): ...        # runs on each rank of 1, 2 and 3 ranks

becomes test_sum[threads-P1] ... and, under mpirun with --with-mpi, test_sum[mpi-P1] ..., on the
first P ranks of the job; the others look on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from hpctrain import world as worlds
from hpctrain.transport.device.gpus import Gpu
from hpctrain.transport.paths import RankPlace, Verdict
from hpctrain.transport.threads.link import LocalLink
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import World

STAGED = Verdict("staged", "staged", "staged", "")

THREAD_RANKS = tuple(range(1, 10))
MPI_RANKS = tuple(range(1, 6))


def on_ranks(*sizes: int, mpi: tuple[int, ...] | None = None) -> Callable:
    """Parametrise a test with `ranks(body)`, which runs `body(world)` on each rank."""
    rows = [pytest.param(("threads", p), id=f"threads-P{p}") for p in sizes]
    for p in sizes if mpi is None else mpi:
        if p in MPI_RANKS:
            rows.append(pytest.param(("mpi", p), id=f"mpi-P{p}", marks=pytest.mark.mpi(min_size=p)))
    return pytest.mark.parametrize("ranks", rows, indirect=True)


def run_on_gpus(size: int, body: Callable[[World], object]) -> list:
    """Return the results of `body(world)` of ranks that are threads and share stand-in 0."""

    def rank(link: LocalLink) -> object:
        return body(on_gpus(worlds.over_threads(link)))

    return run_ranks(size, rank, timeout_s=20)


def on_gpus(world: World, nodes: str = "", gpus: str = "", verdict: Verdict = STAGED) -> World:
    """Return the World of the same ranks, each on the node and stand-in of its letter."""
    import cupy

    cupy.cuda.Stream(non_blocking=True).use()  # not one that other threads wait for, too
    nodes, gpus = nodes or "a" * world.size, gpus or "0" * world.size
    places = tuple(RankPlace(node, f"GPU-{gpu}") for node, gpu in zip(nodes, gpus, strict=True))
    world.link.endpoint.traffic.set_paths([verdict.across] * world.size)
    return World(
        world.link, places, transport=world.transport, verdict=verdict,
        gpu=Gpu(cupy.cuda.runtime.getDevice(), places[world.rank].gpu, ""),
    )  # fmt: skip


def run_on(kind: str, size: int, body: Callable[[World], object]) -> list:
    """Return the results of `body(world)` of the ranks that live in this process."""
    if kind == "threads":
        return run_ranks(size, lambda link: body(worlds.over_threads(link)), timeout_s=20)
    with _first(size) as world:
        return [] if world is None else [body(world)]


@contextmanager
def _first(size: int) -> Iterator[World | None]:
    """Yield a World of the job's first `size` ranks, None on the others."""
    everyone = job_world()
    member = everyone.rank < size
    link = everyone.link.split(int(member), everyone.rank)
    if not member:
        yield None
        link.endpoint.free()
        return
    world = World(
        link, everyone.places[:size], concurrent=everyone.concurrent, transport="mpi", job_size=size
    )
    yield world
    link.barrier()  # a rank that is ready gives back memory that its neighbours may still read
    world.main.free()  # MPICH has 2048 communicators for all tests


@cache
def job_world() -> World:
    """Return the World of all ranks of this job, which serves all tests."""
    return worlds.init()
