"""All ranks of a PyTorch job: its World, started once, with the limit of waits given to PyTorch."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch

from hpctrain.core.errors import LostRankError, UsageError
from hpctrain.core.launchers import SPARES
from hpctrain.core.names import counted
from hpctrain.transport import abort
from hpctrain.transport.gpu_probe.verdicts import OVERRIDE_VARIABLE
from hpctrain.transport.paths import POINTER_PATHS
from hpctrain.world import DEFAULT_TIMEOUT_S, World, current_world, has_spare_cores, init

OLDEST_TORCH = (2, 13)
#: With any value, an older PyTorch is used, with a warning.
OLD_TORCH_VARIABLE = "HPCTRAIN_OLD_TORCH"
GRACE, GRACE_S = 1.1, 5.0
LOST_NAMES_S = 1.0  #: limit of the wait for the names of lost ranks
log = logging.getLogger(__name__)
REDUCTION_VARIABLE = "HPCTRAIN_REDUCTION"


def start_job(timeout: timedelta | None, comm: Any = None) -> World:
    """Return the World of the whole job; starts MPI unless it is running. Collective at first.

    `comm`: an intracommunicator of mpi4py, whose ranks alone are the job; see `ht.init`. `timeout`:
    limit of a wait for other ranks, from `init_process_group`. Cores are not bound: the
    threads of PyTorch, of its data loaders and compilers belong to the user. Raises UsageError if
    PyTorch is too old, and if the job has spares: nothing tells them where the script is.
    """
    check_version(torch.__version__)
    world = current_world()
    if world is None or comm is not None:
        # Waits of the backend end by themselves at the limit; the watch ends what goes beyond it.
        limit_s = DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
        timeout_s = GRACE * limit_s + GRACE_S
        _limits_s.append(limit_s)
        has_cuda = torch.cuda.is_available()
        world = init("auto" if has_cuda else "cpu", timeout_s, comm, binds_cores=False)
        warn_of_allocator(world, os.environ)
    refuse_spares(world)
    return world


def warn_of_allocator(world: World, environ: Mapping[str, str]) -> None:
    """Warn on rank 0 if MPI gets pointers to memory that no other process can map.

    The trials of the paths are made with cudaMalloc. UCX copies other memory through the host.
    """
    verdict = world.verdict
    if world.rank or not {verdict.same_gpu, verdict.same_node} & {*POINTER_PATHS}:
        return
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if match := _UNMAPPABLE.search(environ.get(variable, "")):
            log.warning(
                "%s=%s: MPI gets pointers to memory that other processes cannot map, and may copy "
                "it through the host, slower than in the trials: leave it out, or set %s=staged",
                variable, match[0], OVERRIDE_VARIABLE,
            )  # fmt: skip


#: Settings with which PyTorch's tensors do not come from cudaMalloc.
_UNMAPPABLE = re.compile(r"expandable_segments:\s*True|backend:\s*cudaMallocAsync", re.IGNORECASE)


#: The limit of the first group; the watch ends what goes beyond it.
_limits_s: list[float] = []


def check_limit(limit_s: float) -> None:
    """Raise UsageError if waits of `limit_s` would be ended by the watch."""
    longest_s = max(_limits_s, default=DEFAULT_TIMEOUT_S)
    if not 0 < limit_s <= longest_s:
        raise UsageError(
            f"set_timeout: expected a limit of 0 to {longest_s:g} s, which the job was started "
            f"with, seen {limit_s:g} s: give a longer one to init_process_group"
        )


def refuse_spares(world: World) -> None:
    """Raise UsageError if `world` has spares."""
    if world.job is not None and world.job.spares:
        raise UsageError(
            "spares cannot join a loop of your own: start the script without --spares "
            f"({SPARES}), or train with ht.torch.Trainer"
        )


#: Why a script of torch.distributed ends after a loss, and what to do.
ENDS_AFTER_LOSS = (
    "a script of torch.distributed cannot go on without it; ht.torch.sync and ht.torch.Trainer go "
    "on with the ranks that are left"
)
_ends = threading.Lock()  # of several threads that notice a loss, one ends the job


def end_after_loss(job: World, reason: str = ENDS_AFTER_LOSS) -> NoReturn:
    """End the job; one rank names the lost ranks, and the `reason` why the others end."""
    _ends.acquire()
    deadline = time.monotonic() + LOST_NAMES_S
    while (
        not (lost_ranks := job.link.endpoint.survivors.lost_ranks()) and time.monotonic() < deadline
    ):
        time.sleep(0.01)  # this rank has noticed that links are revoked, not yet whose loss it was
    rank_names = (
        ", ".join(f"rank {rank} ({job.hosts[rank]})" for rank in sorted(lost_ranks)) or "a rank"
    )
    abort.report_loss(
        f"hpctrain: lost {rank_names}: {reason}",
        job.rank - sum(rank < job.rank for rank in lost_ranks) if lost_ranks else job.size,
    )
    abort.abort(LostRankError.exit_code)


def go_on_after_loss(
    world: World, close: Callable[[], Any], rebuild: Callable[[], Any], subject: str
) -> None:
    """Let `world` have the ranks that are left; collective over these.

    `close` ends what uses the earlier links, `rebuild` makes it anew; both are called again if
    ranks are lost meanwhile. The first rank names the lost ranks: `subject` goes on.
    """
    membership = world.membership
    assert membership is not None
    ranks_before = membership.job.numbers
    while True:
        try:
            close()
            membership.renew()
            rebuild()
            break
        except LostRankError:
            continue
    job = membership.job
    lost_ranks = [number for number in ranks_before if number not in job.numbers]
    if lost_ranks and world.rank == 0:
        rank_names = ", ".join(f"{number} ({job.places[number].node})" for number in lost_ranks)
        ranks = counted(world.size, "rank")
        log.warning("lost rank %s; %s goes on with %s", rank_names, subject, ranks)


def check_version(version: str) -> None:
    """Raise UsageError unless `version` of PyTorch is supported, or the user's variable is set."""
    try:
        version_numbers = tuple(int(number) for number in version.split("+")[0].split(".")[:2])
    except ValueError:  # a build from source, as "2.14.0a0+git1234": its first two are numbers
        version_numbers = OLDEST_TORCH
    if version_numbers >= OLDEST_TORCH:
        return
    text = f"PyTorch {'.'.join(map(str, OLDEST_TORCH))} or newer, seen {version}"
    if not os.environ.get(OLD_TORCH_VARIABLE):
        raise UsageError(
            f"the backend hpctrain needs {text}: pip install -U torch, use the backend gloo, or "
            f"try it with {OLD_TORCH_VARIABLE}=1"
        )
    _warn_of_version(text)


@cache
def _warn_of_version(text: str) -> None:
    log.warning("hpctrain was tested with %s, which %s allows", text, OLD_TORCH_VARIABLE)


def uses_threads(job: World) -> bool:
    """Return whether a thread begins asynchronous collectives at once, equal on all ranks.

    Collective.
    """
    global _threaded
    if _threaded is None:
        wants_thread = len(job.main.nodes) > 1 or has_spare_cores(job)
        _threaded = job.size > 1 and job.concurrent and wants_thread
        if job.size > 1 and not job.concurrent and job.rank == 0:
            log.warning(
                "hpctrain: this MPI does not grant MPI_THREAD_MULTIPLE: asynchronous operations of "
                "torch.distributed run in the calls that start them"
            )
    return _threaded


_threaded: bool | None = None


def is_ordered() -> bool:
    """Return whether sums are added in the order of ranks, by HPCTRAIN_REDUCTION.

    Raises UsageError for another value than "ordered" and "fast".
    """
    value = os.environ.get(REDUCTION_VARIABLE, "fast")
    if value not in ("fast", "ordered"):
        raise UsageError(f"{REDUCTION_VARIABLE}: expected fast or ordered, seen {value!r}")
    return value == "ordered"
