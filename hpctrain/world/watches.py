"""The threads that watch a World outside of runs: for long waits, stopped ranks, dead hosts."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np

from hpctrain.collectives import all_gather_bytes
from hpctrain.core import rank_marks
from hpctrain.transport import abort
from hpctrain.transport.shared_memory.host import NodeMemory
from hpctrain.watch import RECORD_BYTES, Watch, WatchRecord
from hpctrain.watch.liveness import Identities, LivenessObserver, LossReports, observe_liveness
from hpctrain.world.world import World

log = logging.getLogger(__name__)


class Watches:
    """The record, the watch and, in a job that survives lost ranks, the observer of a rank."""

    def __init__(self, world: World, timeout_s: float):
        """Begin to watch; collective. `timeout_s`: of a wait for other ranks."""
        self._world, self._timeout_s = world, timeout_s
        self._pages = _share_pages(world)
        if (job := world.job) is not None:
            gather = partial(all_gather_bytes, job.link)
            self._identities = Identities.exchange(job.number, job.hosts, gather)
        self._running: list[Watch | LivenessObserver] = []
        self.renew()
        if world.membership is not None:
            world.membership.on_renewal = self.renew

    def renew(self) -> None:
        """Watch the present ranks of the job, including spares; collective over them."""
        world, job = self._world, self._world.job
        rank, size = (world.rank, world.size) if job is None else (job.link.rank, job.link.size)
        pages = {n: p for n, p in self._pages.items() if job is None or n in job.numbers}
        own_page = pages.pop(world.rank if job is None else job.number)
        record = WatchRecord(rank, size, [own_page, *pages.values()])
        world.threads.record_in(record)
        on_hang = partial(abort.report_hang, rank, None)
        running: list[Watch | LivenessObserver] = []
        if job is not None:
            job.link.endpoint.waits.entry = record.entry("main")
            # First: it may raise LostRankError.
            observer = observe_liveness(
                record,
                job.link.rank,
                job.hosts,
                self._identities.of(job.numbers),
                partial(all_gather_bytes, job.link),
                self._current_step,
                LossReports(
                    lambda rank, reason: _report_lost([job.numbers[rank]], reason),
                    lambda host, reason: _report_lost(
                        [n for n in job.numbers if job.places[n].node == host], reason
                    ),
                    lambda reason: log.critical("%s: its ranks end", reason),
                ),
            )
            running.append(observer)
        # No steps are recorded here.
        running.append(Watch(record, None, self._timeout_s, on_hang, first_step_factor=1))
        for watch in self._running:  # not before: a loss meanwhile must not go unnoticed
            watch.stop()
        self._running = running

    def _current_step(self) -> int:
        record = self._world.threads.record
        return 0 if record is None else record.step


def _share_pages(world: World) -> dict[int, np.ndarray]:
    """Return the pages for records of this node's ranks, by rank; collective.

    A job that survives lost ranks also has the pages of its spares, by their numbers; the pages
    stay in use after losses.
    """
    job = world.job
    own, hosts = (world.rank, world.hosts) if job is None else (job.number, tuple(job.hosts))
    ranks, memory = [rank for rank, host in enumerate(hosts) if host == hosts[own]], world.memory
    if job is not None:
        node = job.group(ranks)
        memory = NodeMemory(node, partial(all_gather_bytes, node))
    page = memory.zeros(RECORD_BYTES, np.uint8)
    pages = memory.neighbours(page)
    return {own: page} if pages is None else dict(zip(ranks, pages, strict=True))


def _report_lost(rank_numbers: list[int], reason: str) -> None:
    """Let MPI, and the launcher, count ranks as lost that these do not notice by themselves."""
    from hpctrain.transport.mpi.lost_processes import report_lost_processes

    log.warning("%s", reason)
    report_lost_processes(rank_numbers)
    for number in rank_numbers:
        rank_marks.write_mark(rank_marks.LOSES, number)
