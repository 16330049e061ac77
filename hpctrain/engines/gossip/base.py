"""The base of engines without a centre: own parameters, and a mean that is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives import broadcast
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.engines.engine import Task, Times, ignore_ready, pieces_of
from hpctrain.engines.replay import Recorder
from hpctrain.engines.staleness import Staleness
from hpctrain.engines.worker_state import Apart
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.transport.link import Link
from hpctrain.tuning.select import auto
from hpctrain.world import World


class GossipEngine:
    """The parts of `hpctrain.engines.engine.Engine` that do not train."""

    name = "gossip"
    algorithm = None
    servers = 0
    updates_per_step = 1.0
    recorder: Recorder | None = None
    staleness: Staleness | None = None

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, settings: str):
        """Begin with the parameters of rank 0; `settings` must agree on all ranks. Collective."""
        arena = replica.arena
        settings = f"{settings}, {arena.param.dtype}, {arena.slots}, {arena.buffer_slots}"
        world.must_agree(settings, "model and options")
        self.replica, self.times = replica, Times()
        self.check = GradientCheck(replica, world.size)
        self.workers, self.worker = world.size, world.rank
        self._world, self._trace, self._group = world, world.trace, world.main
        for plane in (arena.param, arena.buffer):
            broadcast(self._group, plane)  # a user's own model may start from random numbers
        self._apart = Apart(arena, optimizer, self.worker, self.workers)
        self._parted = False  # whether the arena may hold something else on other ranks
        self._links: list[Link] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the start."""
        return sum(link.bytes_sent for link in (self._group.link, *self._links))

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of a few float64 over all ranks, the same on each."""
        total = np.array(numbers, np.float64)
        recursive_doubling(self._group, total, np.add)
        return total

    def settle(self) -> None:
        """Bring the mean into the arena; the next `train` resumes from each worker's own planes."""
        if not self._parted:
            return
        self._parted = False
        self._apart.put_aside()
        with self._trace.span("average", "wait") as waiting:
            for x in (self.replica.arena.param, self.replica.arena.buffer):
                if x.size:
                    auto(self._group, x, np.add)
                    x /= self.workers
        self.times.wait_s += waiting.seconds

    def state(self) -> list[Piece]:
        """Return this rank's 1/P of the mean, and this worker's own arrays."""
        mean = pieces_of(self.replica.arena, {}, self.worker, self.workers)
        return mean + self._apart.pieces()

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the whole state; another number of workers begins at the mean."""
        self._parted = False
        self._apart.load(arrays)

    def close(self) -> None:
        """Free the links; collective."""
        for link in self._links:
            link.free()

    def _take_up(self) -> None:
        """Bring this worker's own planes back into the arena."""
        self._apart.take_up()
        self._parted = True

    def _gradient(self, task: Task, scale: float) -> tuple[Sums, bool]:
        """Compute a gradient; return its sums, and whether it passes the check."""
        start = perf_counter()
        ready = self.check.begin(ignore_ready)
        sums = self.replica.gradient(task.batch, scale, task.key, ready)
        passes = self.check.passes(sums)
        spent = self._trace.add("forward, backward", "compute", start, perf_counter())
        self.times.compute_s += spent
        return sums, passes

    def _update(self, param: np.ndarray) -> None:
        start = perf_counter()
        self._apart.update(param)
        self.times.compute_s += self._trace.add("update", "compute", start, perf_counter())
