"""Start of a World over MPI: bind cores and BLAS, make the GPU current, initialise MPI.

In this order: MPI and UCX read the binding and the current device when MPI is initialised.
"""

from __future__ import annotations

import os
from functools import partial

from hpctrain import abort, collectives
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.transport.device import gpus
from hpctrain.transport.mpi import segments
from hpctrain.transport.placement import rank_placement
from hpctrain.transport.shared_memory import dev_shm
from hpctrain.watch import Watch, WatchRecord
from hpctrain.world.world import World


def over_mpi(device: gpus.Device, timeout_s: float) -> World:
    """Return the World of this rank; collective.

    Raises UsageError if the launcher belongs to another MPI than the one that mpi4py loads, or if
    a "gpu" is not available.
    """
    from hpctrain.transport.mpi.installation import has_pmix, load_mpi

    launched = launchers.launched(os.environ)
    placement = rank_placement.place_rank(launched, device)
    mpi_is = load_mpi()  # its error names what is missing without MPI
    no_pmix = launchers.only_pmix(os.environ) and not has_pmix(mpi_is)
    daemons = launchers.pmix_of_daemons(os.environ)
    if fault := launchers.unstartable(launched, mpi_is.vendor, mpi_is.libmpi, no_pmix, daemons):
        raise UsageError(fault)
    dev_shm.warn_if_full(launched)
    from hpctrain.transport.mpi import startup

    record = WatchRecord(None, launched.rank, launched.size)
    link = startup.start_mpi(record.entry("main"), timeout_s)
    segments.announce_segments()
    if fault := launchers.mismatch(launched, link.size, mpi_is.vendor, mpi_is.libmpi):
        if link.size == 1:  # several ranks of different jobs would wait for each other for ever
            startup.finalize_mpi()
        raise UsageError(fault)
    gather = partial(collectives.all_gather_bytes, link)
    host = rank_placement.node_name(gather, link.rank)
    places, verdict, bindings = rank_placement.exchange_placements(link, gather, host, placement)
    hosts = tuple(binding.host for binding in bindings)
    world = World(
        link,
        hosts,
        local_rank=hosts[: link.rank].count(host),
        concurrent=startup.is_thread_safe(),
        transport="mpi",
        record=record,
        gpu=placement.gpu,
        places=places,
        verdict=verdict,
        bindings=bindings,
    )
    on_hang = partial(abort.report_hang, link.rank, None)
    Watch(record, None, timeout_s, on_hang, first_step_factor=1)  # no steps are recorded yet
    return world
