"""The base of the gossip engines: each worker has its own parameters; the mean is evaluated."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.engines.base import EngineBase
from hpctrain.engines.engine import Flags, average_over, join_flags
from hpctrain.engines.saved_state import SavedState, pieces_of
from hpctrain.engines.worker_state import WorkerState
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.tuning.select import auto
from hpctrain.world import World


class GossipEngine(EngineBase):
    """Implements `hpctrain.engines.engine.Engine` except `train`."""

    name, keeps_step = "gossip", False
    worker: int

    def __init__(self, world: World, replica: Replica, optimizer: Optimizer, settings: str):
        """Begin with the parameters of rank 0; `settings` must agree on all ranks. Collective."""
        super().__init__(world, replica, settings)
        self.check = GradientCheck(replica, world.size)
        state = optimizer.init(replica.arena.param)
        self._worker_state = WorkerState(replica.arena, optimizer, state, self.worker, self.workers)

    def settle(self) -> None:
        """Average into the arena; the next `train` continues from each worker's own planes."""
        self._worker_state.settle(self._average)

    def state(self) -> list[Piece]:
        """Return this rank's 1/P of the mean, and this worker's own arrays."""
        mean = pieces_of(self.replica.arena, {}, self.worker, self.workers)
        return mean + self._worker_state.pieces()

    def load(self, saved: SavedState) -> None:
        """Request the whole state; another number of workers begins at the mean."""
        self._worker_state.load(saved)

    def _train_apart(self) -> None:
        """Continue from this worker's own planes."""
        self._worker_state.restore_planes()
        self._worker_state.train_apart()

    def _join_flags(self, step: int, flags: Flags, failed: bool) -> tuple[int, Flags]:
        """Join step and flags over the ranks: `step`, or the step at which a worker `failed`."""
        if self._world.grid is not None:  # the rank with the fault is named, not its row
            failed = failed and bool(self.check.fault)
        return join_flags(self._world.voters, step, flags, failed)

    def _average(self, arrays: Iterable[np.ndarray]) -> None:
        with self.times.wait(self._trace, "average"):
            average_over(self._group, auto, arrays)

    def _apply_gradient(self, param: np.ndarray) -> None:
        with self.times.compute(self._trace, "update"):
            self._worker_state.update(param)
