"""The begin and the end of a job: `hvd.init` and `hvd.shutdown`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hpctrain.collectives.small_messages import is_any
from hpctrain.core.errors import UsageError
from hpctrain.horovod.torch import job, timeline
from hpctrain.horovod.torch import process_sets as sets
from hpctrain.horovod.torch.named.settings import Settings, read_settings
from hpctrain.horovod.variables import announce_ignored
from hpctrain.torch.job import start_job, uses_threads
from hpctrain.transport.link import Link
from hpctrain.world import World

DYNAMIC = "dynamic"
#: Worlds of the ranks that `comm` has named, with the whole job's link at that time.
_subsets: list[tuple[Link, Sequence[int], World]] = []


def init(comm: Any = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Start MPI unless it is running, and make all ranks ready for operations; collective.

    `comm`: a communicator of mpi4py, whose ranks alone call, or the numbers of the ranks that take
    part: all ranks call, and the others get a UsageError that they may catch.
    `process_sets`: sets to register; the word "dynamic" of Horovod is allowed, as sets can always
    be added. A second call does nothing, unless `shutdown` came between. Of Horovod's variables
    rank 0's hold for all.

    Raises UsageError if this rank is not among the ranks of `comm`.
    """
    if job.is_initialized():
        return
    settings = read_settings()
    limit = timedelta(seconds=settings.limit_s)
    ranks = None if comm is None or hasattr(comm, "Get_group") else list(comm)
    world = start_job(limit, comm if ranks is None else None)
    if ranks and ranks != list(range(world.size)):
        if world.rank not in ranks:
            raise UsageError(f"hvd.init(comm={ranks}): rank {world.rank} is not among these ranks")
        world = _find_subset(world, ranks)
    # Variables may be set on some ranks only.
    chosen = Settings(*world.from_first(lambda: settings))._replace(threaded=uses_threads(world))
    job.begin(world, chosen, frees=not is_any(world.link, not job.can_free(world)))
    if world.rank == 0:
        announce_ignored(os.environ)
    timeline.start_by_variable()
    atexit.register(shutdown)
    try:
        sets.set_up(() if process_sets == DYNAMIC else process_sets or ())  # type: ignore[arg-type]
    except BaseException:
        shutdown()  # another `init` may follow, and begins anew
        raise


def _find_subset(world: World, ranks: Sequence[int]) -> World:
    """Return the World of `ranks` of `world`, the same where it was made before; collective."""
    for link, known_ranks, subset in _subsets:
        if link is world.link and known_ranks == ranks:
            return subset
    subset = world.subset(ranks)
    _subsets.append((world.link, ranks, subset))
    return subset


def shutdown() -> None:
    """Let operations under way fail, and process sets be unknown; `init` may be called again.

    A process that was forked from a rank, as a worker of a DataLoader, has rank and size alone.
    """
    if job.is_initialized() and job.state().process == os.getpid():
        atexit.unregister(shutdown)
        job.end()
        timeline.stop_timeline()
        sets.forget()
