"""Local rank -> cores and BLAS threads, before MPI starts; no other module binds cores.

A launcher's binding is kept. Without one, each rank takes its own share of cores: otherwise P ranks
with BLAS pools of all cores would compete for every core.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core import frameworks
from hpctrain.core.launchers import Launched
from hpctrain.transport.device.gpus import GpuCores


@dataclass(frozen=True)
class Binding:
    """The cores of this rank, the number of its BLAS threads, and a short reason."""

    cores: tuple[int, ...]
    blas_threads: int
    note: str
    offered: int  #: number of cores of the node available to the job


_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")

_limiters: list[Any] = []  # references that keep the limits in force
_user_values: dict[str, str | None] = {}  # of the variables, as they were before the limits


def bind_process(
    launched: Launched,
    available_cores: Sequence[int] | None = None,
    gpu_cores: GpuCores | None = None,
) -> Binding:
    """Bind this process and limit its BLAS by `plan_binding`; return the binding.

    `available_cores` replaces the machine's cores; shares are cut from it in its order.
    """
    online_cores = available_cores or sort_by_topology(_reachable_cores())
    allowed_cores = os.sched_getaffinity(0)
    binding = plan_binding(launched, allowed_cores, online_cores, os.environ, gpu_cores)
    if set(binding.cores) != allowed_cores:
        # A loaded BLAS has started its threads, and each thread has its own mask.
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(thread), binding.cores)
    if user_blas_threads(os.environ) is None:
        _limit_blas(binding.blas_threads)
    else:
        frameworks.limit_threads(binding.blas_threads)
    return binding


def keep_binding(launched: Launched) -> Binding:
    """Return the binding of this process as it is; its threads belong to the caller's program."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    online_cores = _reachable_cores()
    node_ranks = launched.local_size or launched.size
    fair_share = min(len(cores), max(1, len(online_cores) // node_ranks))
    threads = user_blas_threads(os.environ) or fair_share
    return Binding(cores, threads, "kept", len(online_cores))


def limit_blas_to_one_thread() -> None:
    """Limit the BLAS of this process to one thread, unless the user has set a number.

    Otherwise results would depend on the number of ranks: it sets the number of BLAS threads, which
    sets the order of BLAS' sums.
    """
    if _limiters or user_blas_threads(os.environ) is None:  # `_limit_blas` sets the variable, too
        _limit_blas(1)


@contextmanager
def allow_all_cores() -> Iterator[None]:
    """Let this thread, and threads it starts meanwhile, run on every core of its cpuset.

    For threads of other libraries, which would otherwise share the rank's cores with ours.
    """
    initial_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _reachable_cores())
    try:
        yield
    finally:
        os.sched_setaffinity(0, initial_cores)


@contextmanager
def bind_thread_to_core(core: int) -> Iterator[None]:
    """Bind only this thread to one `core` meanwhile; raise OSError if the kernel refuses."""
    initial_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, initial_cores)


def plan_binding(
    launched: Launched,
    allowed_cores: Collection[int],
    online_cores: Sequence[int],
    environ: Mapping[str, str],
    gpu_cores: GpuCores | None = None,
) -> Binding:
    """Return the cores and BLAS threads of a rank that may run on `allowed_cores`.

    Shares are cut from `online_cores` in its order; a rank with a GPU has a share of `gpu_cores`.
    A user's OPENBLAS_NUM_THREADS, MKL_NUM_THREADS or OMP_NUM_THREADS overrides our count.
    """
    # Without the local size the number of nodes is unknown: assume a single node.
    node_ranks = launched.local_size or launched.size
    cores, note = _choose_cores(launched, node_ranks, allowed_cores, online_cores)
    if gpu_cores is not None and launched.size > 1 and not set(online_cores) - set(allowed_cores):
        cores, note = _choose_gpu_cores(gpu_cores, online_cores) or (cores, note)
    # Ranks bound to one socket share its cores, so even a bound rank may not use every core.
    fair_share = min(len(cores), max(1, len(online_cores) // node_ranks))
    return Binding(cores, user_blas_threads(environ) or fair_share, note, len(online_cores))


def sort_by_topology(cores: Collection[int]) -> tuple[int, ...]:
    """Return `cores` ordered by socket and physical core: a share has both threads of a core."""
    return tuple(sorted(cores, key=lambda core: (*_socket_and_core(core), core)))


def _choose_cores(
    launched: Launched, node_ranks: int, allowed_cores: Collection[int], online_cores: Sequence[int]
) -> tuple[tuple[int, ...], str]:
    sorted_cores, rank, count = tuple(sorted(allowed_cores)), launched.local_rank, len(online_cores)
    if launched.size == 1:
        return sorted_cores, "alone"
    if set(online_cores) - set(allowed_cores):
        return sorted_cores, f"bound by the launcher to {len(sorted_cores)} of {count} cores"
    if node_ranks > count:
        return sorted_cores, f"not bound: {node_ranks} ranks share {count} cores"
    if rank is None or launched.local_size is None or rank >= node_ranks:
        return sorted_cores, "not bound: the launcher sets no local rank"
    share = online_cores[rank * count // node_ranks : (rank + 1) * count // node_ranks]
    return tuple(sorted(share)), f"took {len(share)} of {count} cores as local rank {rank}"


def _choose_gpu_cores(
    gpu_cores: GpuCores, online_cores: Sequence[int]
) -> tuple[tuple[int, ...], str] | None:
    """Return a rank's share of the cores near its GPU, and a short reason.

    None if the cores are fewer than the ranks near them. A rank of unknown index takes all cores.
    """
    cores = [core for core in online_cores if core in gpu_cores.cores]
    if not cores or (gpu_cores.index is not None and gpu_cores.count > len(cores)):
        return None
    if gpu_cores.index is None:
        return tuple(sorted(cores)), f"took all {len(cores)} cores near its GPU"
    start, end = (i * len(cores) // gpu_cores.count for i in (gpu_cores.index, gpu_cores.index + 1))
    share = cores[start:end]
    return tuple(sorted(share)), f"took {len(share)} of {len(cores)} cores near its GPU"


def user_blas_threads(environ: Mapping[str, str]) -> int | None:
    """Return the number of BLAS threads that the user set; None if no variable is set."""
    for name in _THREAD_VARIABLES:
        # OpenMP's value may list one number per level of nesting; the first is the outermost
        if match := re.match(r"\s*([1-9]\d*)", environ.get(name, "")):
            return int(match[1])
    return None


def without_limits(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the user's numbers of threads, for ranks with limits of their own."""
    values = {**environ, **_user_values}
    return {name: value for name, value in values.items() if value is not None}


def _reachable_cores() -> set[int]:
    """Return the online cores in the cpuset of this process."""
    initial_cores = os.sched_getaffinity(0)
    try:  # the kernel reduces a request for all cores to the cpuset
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


def _limit_blas(threads: int) -> None:
    import numpy  # noqa: F401 - a limit reaches only the BLAS that is loaded
    import threadpoolctl

    # Libraries loaded later, such as SciPy, may have their own BLAS, which reads the variables.
    for name in _THREAD_VARIABLES:
        _user_values.setdefault(name, os.environ.get(name))
        os.environ[name] = str(threads)
    frameworks.limit_threads(threads)
    _limiters.append(threadpoolctl.threadpool_limits(limits=threads, user_api="blas"))
