"""The World of this process: made by the first `init()`, finalized at exit, aborted on an error."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
from functools import partial
from os import register_at_fork
from typing import Any

from hpctrain.core import rank_marks
from hpctrain.core.errors import (
    HpctrainError,
    LostRankError,
    RecoveryError,
    StoppedError,
    UsageError,
)
from hpctrain.core.launchers import Launched
from hpctrain.transport import abort
from hpctrain.transport.device import gpus
from hpctrain.transport.placement import rank_placement
from hpctrain.world.start import must_start, over_mpi, start_mpi
from hpctrain.world.world import World

DEFAULT_TIMEOUT_S = 300.0

_world: World | None = None


def init(
    device: gpus.Device = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    comm: Any = None,
    binds_cores: bool = True,
) -> World:
    """Bind cores and GPU, start MPI and return the World; a second call returns the same World.

    `device`: "cpu", "gpu", or "auto", a GPU where CuPy and CUDA find one. `timeout_s`: limit of a
    wait for other ranks, at the start and outside of a training run. Without a launcher this is a
    world of one rank. `comm`: an intracommunicator of mpi4py, whose ranks become the World; it is
    duplicated, and other ranks need not call. An error that a rank does not catch still ends the
    whole job, these ranks too. MPI that the caller has started is not finalized here.
    `binds_cores`: give this rank its share of the cores and of BLAS threads.

        comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank < 3)
        if MPI.COMM_WORLD.rank < 3:
            world = ht.init(comm=comm)

    Raises UsageError if the launcher belongs to another MPI than the one that mpi4py loads, if a
    "gpu" is not available, if `comm` is no intracommunicator with this rank in it, or if a second
    call asks for another device or for other ranks.
    """
    global _world
    if _world is None:
        # A process that multiprocessing starts, and that imports the script.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UsageError(
                "init: a worker process, as of a DataLoader, runs the script of its rank while it "
                'starts; put the script\'s statements under `if __name__ == "__main__":`'
            )
        try:
            _world = over_mpi(device, timeout_s, comm, binds_cores)
        except UsageError as error:  # most likely on all ranks: one reports it
            report_without_traceback(error)
            raise
        atexit.register(finish)
        register_at_fork(after_in_child=_forget_world)
        sys.excepthook = _uncaught
    elif device not in ("auto", _world.device[:3]):
        raise UsageError(f"init('{device}'): MPI was started before, on device {_world.device}")
    elif comm is not None:
        from hpctrain.transport.mpi import startup

        startup.check_communicator(comm)
        if not startup.has_ranks_of(_world.link, comm):
            raise UsageError(
                f"init(comm=...) has {comm.size} ranks, but the World of this process was made "
                f"before, of {_world.size} others or in another order: make sub-worlds of it by "
                "world.split or world.subset"
            )
    return _world


def start_before_script(job: Launched) -> Any:
    """Start MPI before the script of this rank; return a communicator of all ranks. Collective.

    It may name the network adapter for MPI, and binds no cores. MPI is finalized at exit, by the
    World if the script makes one. Raises UsageError if the launcher belongs to another MPI than the
    one that mpi4py loads.
    """
    rank_placement.place_rank(job, "cpu", binds_cores=False)
    must_start(job)
    from hpctrain.transport.mpi import startup

    with startup.start_limit(DEFAULT_TIMEOUT_S):
        comm, _ = start_mpi(job)
    atexit.register(_finalize_mpi, os.getpid())
    return comm


def _finalize_mpi(process: int) -> None:
    """Finalize MPI in the process that started it, not in a fork, unless its World has."""
    from hpctrain.transport.mpi import startup

    if os.getpid() == process and _world is None:
        rank_marks.write_mark(rank_marks.FINISHES)
        startup.finalize_mpi()


def report_without_traceback(error: UsageError) -> None:
    """Print `error` without a traceback if it is not caught: the script is not at fault."""
    sys.excepthook = partial(_uncaught, refused=error)


def current_world() -> World | None:
    """Return the World of `init()`, None before that call."""
    return _world


def _forget_world() -> None:
    """Leave MPI, and its end, to the process that this one was forked from."""
    global _world
    if _world is not None and _world.job_size > 1:
        _world = None


def finish(exit_code: int = 0) -> None:
    """Finalize MPI once every rank has called this; a script that called `init` does so at exit.

    Spares that still wait end with `exit_code`. After the loss of a rank the ranks that are left
    only wait for each other: MPI_Finalize may never return.
    """
    if _world is None:
        return
    from hpctrain.transport.mpi import startup

    rank_marks.write_mark(rank_marks.FINISHES)
    if startup.is_running():
        if _world.threads.record is not None:
            _world.threads.record.mark_ended()
        job = _world.job
        try:
            if job is not None:
                job.dismiss_spares(
                    json.dumps({"error": "JobEndedError", "argument": exit_code}).encode()
                )
            _world.link.barrier()  # on our own link: the watch names the missing ranks
        except LostRankError:
            return
        if job is None or not job.has_lost_ranks:
            startup.finalize_mpi()


def fail_alone(error: BaseException) -> None:
    """Print this rank's error, and abort the job: the other ranks wait for this one."""
    if _world is None:
        abort.report_before_mpi(error)
    else:
        _world.abort(error)


def report_agreed(error: BaseException) -> None:
    """Print an error that all ranks raise, from the first rank that is left."""
    if _world is not None and (_world.job or _world).link.rank == 0:
        abort.report_agreed(error)


def _uncaught(
    kind: type[BaseException],
    error: BaseException,
    trace: object,
    refused: BaseException | None = None,
) -> None:
    """Print an uncaught error; exit with its code, also in a world with a single rank."""
    if error is refused:
        abort.refuse(error, str(error))
    elif isinstance(error, StoppedError | RecoveryError) and _world is not None:
        report_agreed(error)  # all ranks end, none is at fault
    else:
        fail_alone(error)
    code = error.exit_code if isinstance(error, HpctrainError) else 1
    if _world is None and "mpi4py.MPI" in sys.modules:
        from hpctrain.transport.mpi import startup

        if startup.is_started_by_caller():  # its MPI_Finalize would wait for the other ranks
            abort.abort(code)
    if isinstance(error, HpctrainError):
        sys.exit(code)
