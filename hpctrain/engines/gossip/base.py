"""The base of the gossip engines: workers have parameters of their own, the mean is evaluated."""

from __future__ import annotations

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.engines.engine import (
    Task,
    Times,
    broadcast_replica,
    pieces_of,
    sum_over,
)
from hpctrain.engines.replay import Recorder
from hpctrain.engines.saved_state import SavedState
from hpctrain.engines.staleness import Staleness
from hpctrain.engines.worker_state import WorkerState
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.transport.link import Link
from hpctrain.tuning.select import auto
from hpctrain.world import World


class GossipEngine:
    """All of `hpctrain.engines.engine.Engine` but `train`."""

    name = "gossip"
    algorithm = None
    servers = 0
    updates_per_step = 1.0
    recorder: Recorder | None = None
    staleness: Staleness | None = None

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, settings: str):
        """Begin with the parameters of rank 0; `settings` must agree on all ranks. Collective."""
        broadcast_replica(world, replica, settings)
        self.replica, self.times = replica, Times()
        self.check = GradientCheck(replica, world.size)
        self.workers, self.worker = world.size, world.rank
        self._world, self._trace, self._group = world, world.trace, world.main
        self._worker_state = WorkerState(replica.arena, optimizer, self.worker, self.workers)
        self._params_differ = False  # whether the arenas of ranks may differ
        self._links: list[Link] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the start."""
        return sum(link.bytes_sent for link in (self._group.link, *self._links))

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of a few float64 over all ranks, the same on each."""
        return sum_over(self._group, numbers)

    def settle(self) -> None:
        """Average into the arena; the next `train` continues from each worker's own planes."""
        if not self._params_differ:
            return
        self._params_differ = False
        self._worker_state.save_planes()
        with self._trace.span("average", "wait") as wait_span:
            for x in (self.replica.arena.param, self.replica.arena.buffer):
                if x.size:
                    auto(self._group, x, np.add)
                    x /= self.workers
        self.times.wait_s += wait_span.seconds

    def state(self) -> list[Piece]:
        """Return this rank's 1/P of the mean, and this worker's own arrays."""
        mean = pieces_of(self.replica.arena, {}, self.worker, self.workers)
        return mean + self._worker_state.pieces()

    def load(self, saved: SavedState) -> None:
        """Request the whole state; another number of workers begins at the mean."""
        self._params_differ = False
        self._worker_state.load(saved)

    def close(self) -> None:
        """Free the links; collective."""
        for link in self._links:
            link.free()

    def _restore_planes(self) -> None:
        """Copy this worker's own planes back into the arena."""
        self._worker_state.restore_planes()
        self._params_differ = True

    def _compute_gradient(self, task: Task, scale: float) -> tuple[Sums, bool]:
        """Compute a gradient; return (sums, whether the gradient is finite)."""
        with self.times.compute(self._trace, "forward, backward"):
            on_ready = self.check.begin(ignore_ready)
            sums = self.replica.gradient(task.batch, scale, task.key, on_ready)
            is_finite = self.check.passes(sums)
        return sums, is_finite

    def _apply_gradient(self, param: np.ndarray) -> None:
        with self.times.compute(self._trace, "update"):
            self._worker_state.update(param)
