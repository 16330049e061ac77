"""Local rank -> cores and BLAS threads. Called before MPI starts; the one place that binds cores.

A launcher that binds is obeyed. Where none did, each rank takes its own block of cores: otherwise
P ranks with a BLAS pool of all cores each would take turns on every core.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import threadpoolctl

from hpctrain.launchers import Launched
from hpctrain.transport.gpus import Near


@dataclass(frozen=True)
class Binding:
    """The cores this rank may run on, the threads its BLAS uses, and why, in a few words."""

    cores: tuple[int, ...]
    blas_threads: int
    note: str
    offered: int  #: how many cores there were to take from


_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

_limiters: list[threadpoolctl.threadpool_limits] = []  # held, so that the limit lives as long


def bind(
    launched: Launched, cores_available: Sequence[int] | None = None, near: Near | None = None
) -> Binding:
    """Bind this process and limit its BLAS as `plan` says; return the plan.

    `cores_available`, in the order in which to deal them out, replaces what the machine offers.
    """
    online = cores_available or by_place(_reachable())
    allowed = os.sched_getaffinity(0)
    binding = plan(launched, allowed, online, os.environ, near)
    if set(binding.cores) != allowed:
        _move(binding.cores)
    if asked_threads(os.environ) is None:
        _limit(binding.blas_threads)
    return binding


def one_blas_thread() -> None:
    """Limit the BLAS of this process to one thread, unless the user asked for a number.

    Cores per rank depend on the number of ranks, and how BLAS adds on how many threads it has.
    """
    if _limiters or asked_threads(os.environ) is None:  # what is asked for may be our own limit
        _limit(1)


@contextmanager
def unbound() -> Iterator[None]:
    """Let this thread, and those it starts meanwhile, run on every core that it can reach.

    For other libraries' threads, which would have to take turns with ours on the rank's own core.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _reachable())
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Keep this thread alone to one `core` for a while; raise OSError where that is refused."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def plan(
    launched: Launched,
    allowed: Collection[int],
    online: Sequence[int],
    environ: Mapping[str, str],
    near: Near | None = None,
) -> Binding:
    """Return the cores and BLAS threads of a rank that may run on `allowed` of `online` cores.

    `online` is in the order in which blocks are cut from it; a rank with a GPU takes its block of
    the cores `near` it. A user's OPENBLAS_NUM_THREADS, MKL_NUM_THREADS or OMP_NUM_THREADS goes
    before our count.
    """
    # On how many nodes the others are is unknown where the local size is: assume the worst.
    neighbours = launched.local_size or launched.size
    cores, note = _cores(launched, neighbours, allowed, online)
    if near is not None and launched.size > 1 and not set(online) - set(allowed):
        cores, note = _cores_near(near, online) or (cores, note)
    # Ranks bound to one socket share its cores, so not even a bound rank may use all it sees.
    fair = min(len(cores), max(1, len(online) // neighbours))
    return Binding(cores, asked_threads(environ) or fair, note, len(online))


def by_place(cores: Collection[int]) -> tuple[int, ...]:
    """Return `cores` ordered by socket and physical core, so that a block keeps siblings."""
    return tuple(sorted(cores, key=lambda core: (*_place(core), core)))


def _cores(
    launched: Launched, neighbours: int, allowed: Collection[int], online: Sequence[int]
) -> tuple[tuple[int, ...], str]:
    mine, rank, count = tuple(sorted(allowed)), launched.local_rank, len(online)
    if launched.size == 1:
        return mine, "alone"
    if set(online) - set(allowed):
        return mine, f"bound by the launcher to {len(mine)} of {count} cores"
    if neighbours > count:
        return mine, f"not bound: {neighbours} ranks share {count} cores"
    if rank is None or launched.local_size is None or rank >= neighbours:
        return mine, "not bound: the launcher does not tell the local rank"
    block = online[rank * count // neighbours : (rank + 1) * count // neighbours]
    return tuple(sorted(block)), f"took {len(block)} of {count} cores as local rank {rank}"


def _cores_near(near: Near, online: Sequence[int]) -> tuple[tuple[int, ...], str] | None:
    """Return the block of a rank among those whose GPUs lie near the same cores, as its GPU does.

    None where these are too few. A rank that does not know its place among them takes all.
    """
    cores = [core for core in online if core in near.cores]
    if not cores or (near.index is not None and near.count > len(cores)):
        return None
    if near.index is None:
        return tuple(sorted(cores)), f"took all {len(cores)} cores near its GPU"
    start, end = (i * len(cores) // near.count for i in (near.index, near.index + 1))
    block = cores[start:end]
    return tuple(sorted(block)), f"took {len(block)} of {len(cores)} cores near its GPU"


def asked_threads(environ: Mapping[str, str]) -> int | None:
    """Return how many BLAS threads the user asks for; None where nothing is said."""
    for name in _THREAD_VARIABLES:
        # OpenMP takes a list, one number per level of nesting; the first is the outer one
        if found := re.match(r"\s*([1-9]\d*)", environ.get(name, "")):
            return int(found[1])
    return None


def _reachable() -> set[int]:
    """Return the cores that this process could be given: online, and in its cpuset."""
    before = os.sched_getaffinity(0)
    try:  # the kernel cuts a request for everything down to what the cpuset holds
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        return os.sched_getaffinity(0)
    except OSError:
        return before
    finally:
        os.sched_setaffinity(0, before)


def _place(core: int) -> tuple[int, int]:
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        socket = int((topology / "physical_package_id").read_text())
        return socket, int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, core


def _move(cores: Collection[int]) -> None:
    # A BLAS that is already loaded has its threads, and each thread has a mask of its own.
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # it ended since the listing
            continue


def _limit(threads: int) -> None:
    import numpy  # noqa: F401 - a limit reaches only the BLAS that is loaded

    # Libraries that are loaded later bring a BLAS of their own (SciPy does): they read these.
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    _limiters.append(threadpoolctl.threadpool_limits(limits=threads, user_api="blas"))
