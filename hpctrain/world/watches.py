"""The threads that watch a World outside of runs: for long waits, stopped ranks, dead hosts."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np

from hpctrain import abort
from hpctrain.collectives import all_gather_bytes
from hpctrain.transport.shared_memory.host import NodeMemory
from hpctrain.watch import RECORD_BYTES, Watch, WatchRecord
from hpctrain.watch.liveness import LivenessObserver, LossReports, observe_liveness
from hpctrain.world.job import Job
from hpctrain.world.world import World

log = logging.getLogger(__name__)


class Watches:
    """The record, the watch and, in a job that survives lost ranks, the observer of a rank."""

    def __init__(self, world: World, timeout_s: float):
        """Begin to watch; collective. `timeout_s`: of a wait for other ranks."""
        self._world, self._timeout_s = world, timeout_s
        self._running: list[Watch | LivenessObserver] = []
        self.renew()

    def renew(self) -> None:
        """Watch the ranks of the job as they are now, spares included; collective over these."""
        world, job = self._world, self._world.job
        record = _share_record(world) if job is None else _share_job_record(job)
        world.record_in(record)
        on_hang = partial(abort.report_hang, record.rank, None)
        running: list[Watch | LivenessObserver] = [
            Watch(record, None, self._timeout_s, on_hang, first_step_factor=1)  # no steps recorded
        ]
        if job is not None:
            running.append(self._observe(job, record))
        for watch in self._running:  # not before: a loss meanwhile must not go unnoticed
            watch.stop()
        self._running = running

    def _observe(self, job: Job, record: WatchRecord) -> LivenessObserver:
        return observe_liveness(
            record,
            job.link.rank,
            job.hosts,
            partial(all_gather_bytes, job.link),
            self._step,
            LossReports(
                lambda rank, reason: _report_lost([job.numbers[rank]], reason),
                lambda host, reason: _report_lost(job.numbers_on(host), reason),
                lambda reason: log.critical("%s: its ranks end", reason),
            ),
        )

    def _step(self) -> int:
        record = self._world.record
        return 0 if record is None else record.step


def _share_record(world: World) -> WatchRecord:
    """Return a record in memory of the node, whose ranks report each other; collective."""
    page = world.memory.zeros(RECORD_BYTES, np.uint8)
    pages = world.memory.neighbours(page) or [page]
    others = [pages[r] for r in range(len(pages)) if r != world.node.rank]
    return WatchRecord(world.rank, world.size, [page, *others])


def _share_job_record(job: Job) -> WatchRecord:
    """Return a record in memory of the node, shared also with its spares; collective."""
    host = job.places[job.number].node
    node = job.link.split(job.hosts.index(host), job.link.rank)
    memory = NodeMemory(node, partial(all_gather_bytes, node))
    page = memory.zeros(RECORD_BYTES, np.uint8)
    pages = memory.neighbours(page) or [page]
    others = [pages[r] for r in range(len(pages)) if r != node.rank]
    return WatchRecord(job.link.rank, job.link.size, [page, *others])


def _report_lost(numbers: list[int], reason: str) -> None:
    """Let MPI count ranks as lost that it does not notice by itself."""
    from hpctrain.transport.mpi.lost_processes import report_lost_processes

    log.warning("%s", reason)
    report_lost_processes(numbers)
