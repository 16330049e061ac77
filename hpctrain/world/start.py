"""Start of a World over MPI: bind cores and BLAS, make the GPU current, initialise MPI.

In this order: MPI and UCX read the binding and the current device when MPI is initialised.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from hpctrain import collectives
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.transport.device import gpus
from hpctrain.transport.link import Link
from hpctrain.transport.mpi import segments
from hpctrain.transport.paths import RankPlace
from hpctrain.transport.placement import rank_placement
from hpctrain.transport.shared_memory import dev_shm
from hpctrain.watch import WatchRecord
from hpctrain.world.job import Job, min_ranks_requested, spares_requested
from hpctrain.world.watches import Watches
from hpctrain.world.world import World, make_world


def over_mpi(
    device: gpus.Device, timeout_s: float, comm: Any = None, binds_cores: bool = True
) -> World:
    """Return the World of the ranks of `comm`, by default COMM_WORLD; collective over `comm`.

    Raises UsageError if the launcher belongs to another MPI than the one that mpi4py loads, if
    `comm` is no intracommunicator with this rank in it, or if a "gpu" is not available.
    """
    launched = launchers.launched(os.environ)
    placement = rank_placement.place_rank(launched, device, binds_cores)
    must_start(launched)
    from hpctrain.transport.mpi import startup

    with startup.start_limit(timeout_s):
        return _start_world(launched, placement, timeout_s, comm)


def _start_world(
    launched: launchers.Launched,
    placement: rank_placement.Placement,
    timeout_s: float,
    comm: Any,
) -> World:
    from hpctrain.transport.mpi import startup
    from hpctrain.transport.mpi.fault_tolerance import Family
    from hpctrain.transport.mpi.link import MpiLink

    whole_job = comm is None
    comm, job_size = start_mpi(launched, comm)

    record = WatchRecord(comm.rank, comm.size)
    link = MpiLink(comm, record.entry("main"), family=Family(whole_job))
    gather = partial(collectives.all_gather_bytes, link)
    host = rank_placement.node_name(gather, link.rank)
    places, verdict, bindings = rank_placement.exchange_placements(link, gather, host, placement)
    job = _make_job(link, places)
    world = make_world(
        link,
        places,
        job,
        concurrent=startup.is_thread_safe(),
        transport="mpi",
        job_size=job_size,
        gpu=placement.gpu,
        verdict=verdict,
        bindings=bindings if job is None else job.of_peers(bindings),
    )
    world.threads.record = record
    Watches(world, timeout_s)
    return world


def must_start(launched: launchers.Launched) -> None:
    """Load MPI; raise UsageError if it cannot start under this launcher."""
    from hpctrain.transport.mpi.installation import has_pmix, load_mpi

    mpi_is = load_mpi()  # its error names what is missing without MPI
    no_pmix = launchers.only_pmix(os.environ) and not has_pmix(mpi_is)
    daemons = launchers.pmix_of_daemons(os.environ)
    if fault := launchers.unstartable(launched, mpi_is.vendor, mpi_is.libmpi, no_pmix, daemons):
        raise UsageError(fault)
    dev_shm.warn_if_full(launched)


def start_mpi(launched: launchers.Launched, comm: Any = None) -> tuple[Any, int]:
    """Start MPI unless it runs; return a duplicate of `comm`, and the number of ranks started.

    `comm` defaults to COMM_WORLD; call `must_start` before. Raises UsageError as `over_mpi` does.
    """
    from hpctrain.transport.mpi import startup
    from hpctrain.transport.mpi.installation import load_mpi

    mpi_is = load_mpi()
    if comm is not None:
        startup.check_communicator(comm)
    comm, job_size = startup.start_mpi(comm), startup.job_size()
    segments.announce_segments()
    if fault := launchers.mismatch(launched, job_size, mpi_is.vendor, mpi_is.libmpi):
        if job_size == 1:  # several ranks of different jobs would wait for each other for ever
            startup.finalize_mpi()
        raise UsageError(fault)
    return comm, job_size


def _make_job(link: Link, places: tuple[RankPlace, ...]) -> Job | None:
    """Return the job of all ranks; None if a lost rank ends the job.

    Raises UsageError if it then asks for spares.
    """
    spares = spares_requested(os.environ, link.size)
    if link.endpoint.survivors.survives:
        min_ranks = min_ranks_requested(os.environ, link.size)
        return Job.of_ranks(link, places, spares, min_ranks)
    if spares:
        raise UsageError(
            f"{launchers.SPARES} is set, but this job does not survive the loss of ranks: start "
            "it with `hpctrain launch --elastic` or `mpirun --with-ft ulfm` of Open MPI 5"
        )
    return None
