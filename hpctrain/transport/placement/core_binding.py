"""Local rank -> cores and BLAS threads. Called before MPI starts; the one place that binds cores.

The binding of a launcher is kept. Without one, each rank takes its own share of cores: otherwise
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

from hpctrain.core.launchers import Launched
from hpctrain.transport.device.gpus import GpuCores


@dataclass(frozen=True)
class Binding:
    """The cores this rank may run on, the threads of its BLAS, and the reason in a few words."""

    cores: tuple[int, ...]
    blas_threads: int
    note: str
    offered: int  #: cores of the node that could be given


_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

_limiters: list[threadpoolctl.threadpool_limits] = []  # references that keep the limits in force


def bind(
    launched: Launched,
    cores_available: Sequence[int] | None = None,
    gpu_cores: GpuCores | None = None,
) -> Binding:
    """Bind this process and limit its BLAS as `plan` says; return the plan.

    `cores_available`, in the order in which shares are cut from it, replaces the machine's cores.
    """
    online = cores_available or by_topology(_reachable())
    allowed = os.sched_getaffinity(0)
    binding = plan(launched, allowed, online, os.environ, gpu_cores)
    if set(binding.cores) != allowed:
        _move(binding.cores)
    if user_threads(os.environ) is None:
        _limit(binding.blas_threads)
    return binding


def one_blas_thread() -> None:
    """Limit the BLAS of this process to one thread, unless the user set a number.

    Cores per rank depend on the number of ranks, and the order of BLAS' sums on its threads.
    """
    if _limiters or user_threads(os.environ) is None:  # the variable may be our own limit
        _limit(1)


@contextmanager
def unbound() -> Iterator[None]:
    """Let this thread, and those it starts meanwhile, run on every core of its cpuset.

    For other libraries' threads, which would otherwise share the rank's own core with ours.
    """
    initial_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _reachable())
    try:
        yield
    finally:
        os.sched_setaffinity(0, initial_cores)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Bind this thread alone to one `core` meanwhile; raise OSError where that is refused."""
    initial_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, initial_cores)


def plan(
    launched: Launched,
    allowed: Collection[int],
    online: Sequence[int],
    environ: Mapping[str, str],
    gpu_cores: GpuCores | None = None,
) -> Binding:
    """Return the cores and BLAS threads of a rank that may run on `allowed` of `online` cores.

    `online` is in the order in which shares are cut from it; a rank with a GPU takes its share of
    `gpu_cores`. A user's OPENBLAS_NUM_THREADS, MKL_NUM_THREADS or OMP_NUM_THREADS overrides our
    count.
    """
    # Without the local size the number of nodes is unknown: assume the worst, a single one.
    neighbours = launched.local_size or launched.size
    cores, note = _cores(launched, neighbours, allowed, online)
    if gpu_cores is not None and launched.size > 1 and not set(online) - set(allowed):
        cores, note = _cores_for_gpu(gpu_cores, online) or (cores, note)
    # Ranks bound to one socket share its cores, so even a bound rank may not use all of them.
    fair_share = min(len(cores), max(1, len(online) // neighbours))
    return Binding(cores, user_threads(environ) or fair_share, note, len(online))


def by_topology(cores: Collection[int]) -> tuple[int, ...]:
    """Return `cores` ordered by socket and physical core, so that a share keeps siblings."""
    return tuple(sorted(cores, key=lambda core: (*_socket_and_core(core), core)))


def _cores(
    launched: Launched, neighbours: int, allowed: Collection[int], online: Sequence[int]
) -> tuple[tuple[int, ...], str]:
    allowed_cores, rank, count = tuple(sorted(allowed)), launched.local_rank, len(online)
    if launched.size == 1:
        return allowed_cores, "alone"
    if set(online) - set(allowed):
        return allowed_cores, f"bound by the launcher to {len(allowed_cores)} of {count} cores"
    if neighbours > count:
        return allowed_cores, f"not bound: {neighbours} ranks share {count} cores"
    if rank is None or launched.local_size is None or rank >= neighbours:
        return allowed_cores, "not bound: the launcher sets no local rank"
    share = online[rank * count // neighbours : (rank + 1) * count // neighbours]
    return tuple(sorted(share)), f"took {len(share)} of {count} cores as local rank {rank}"


def _cores_for_gpu(
    gpu_cores: GpuCores, online: Sequence[int]
) -> tuple[tuple[int, ...], str] | None:
    """Return the share of a rank among the ranks whose GPUs are near the same cores.

    None where these cores are too few. A rank of unknown index among them takes all.
    """
    cores = [core for core in online if core in gpu_cores.cores]
    if not cores or (gpu_cores.index is not None and gpu_cores.count > len(cores)):
        return None
    if gpu_cores.index is None:
        return tuple(sorted(cores)), f"took all {len(cores)} cores near its GPU"
    start, end = (i * len(cores) // gpu_cores.count for i in (gpu_cores.index, gpu_cores.index + 1))
    share = cores[start:end]
    return tuple(sorted(share)), f"took {len(share)} of {len(cores)} cores near its GPU"


def user_threads(environ: Mapping[str, str]) -> int | None:
    """Return the number of BLAS threads that the user set; None if no variable is set."""
    for name in _THREAD_VARIABLES:
        # OpenMP takes a list, one number per level of nesting; the first is the outer one
        if match := re.match(r"\s*([1-9]\d*)", environ.get(name, "")):
            return int(match[1])
    return None


def _reachable() -> set[int]:
    """Return the cores that this process could run on: online, and in its cpuset."""
    initial_cores = os.sched_getaffinity(0)
    try:  # the kernel reduces a request for all cores to those of the cpuset
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        return os.sched_getaffinity(0)
    except OSError:
        return initial_cores
    finally:
        os.sched_setaffinity(0, initial_cores)


def _socket_and_core(core: int) -> tuple[int, int]:
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
