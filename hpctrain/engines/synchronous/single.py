"""One device: gradient, update. The reference for every other engine.

w <- w - update(dL/dw)
"""

from __future__ import annotations

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.engines.engine import (
    Engine,
    Flags,
    Task,
    Times,
    train_in_lockstep,
)
from hpctrain.engines.options import EngineOptions
from hpctrain.engines.saved_state import SavedState, pieces_of, request_state
from hpctrain.engines.synchronous.gradient_sums import warn_of_residuals
from hpctrain.gradients.blocks import BlockReplica, ReductionOptions
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums
from hpctrain.optim import Optimizer
from hpctrain.watch.trace import Trace
from hpctrain.world import World


@config.options
class Single(ReductionOptions, EngineOptions):
    """Options of training on a single device: the order of its sums."""

    def must_fit(self, workers: int) -> None:
        """Raise UsageError for more than one worker."""
        if workers > 1:
            raise UsageError(
                f"engine 'single' trains on one rank, but {workers} were started; start one, "
                "or choose --engine allreduce"
            )

    def build(self, world: World, replica: Replica, optimizer: Optimizer) -> SingleEngine:
        """Return the engine of the only rank there is."""
        self.must_fit(world.size)
        tree = self.tree(1)
        return SingleEngine(
            BlockReplica(replica, tree, 0) if tree else replica, optimizer, world.trace
        )


class SingleEngine(Engine):
    """See `hpctrain.engines.engine.Engine`."""

    name = "single"
    workers, worker = 1, 0

    def __init__(self, replica: Replica, optimizer: Optimizer, trace: Trace | None = None):
        self.replica, self.times, self._trace = replica, Times(), trace or Trace()
        self._optimizer, self._state = optimizer, optimizer.init(replica.arena.param)
        self.check = GradientCheck(replica, 1)

    train = train_in_lockstep

    def step(self, task: Task, flags: Flags) -> tuple[Sums, Flags]:
        """Compute the gradient and update with it, unless it is not finite."""
        arena = self.replica.arena
        with self.times.compute(self._trace, "forward, backward"):
            sums = self.replica.gradient(*task, self.check.begin(ignore_ready))
            flags = flags if self.check.passes(sums) else flags.with_failure(0)
        with self.times.compute(self._trace, "update"):
            if not flags.failed:
                self._optimizer.update(
                    arena.grad, self._state, arena.param, arena.layout, arena.gather_rows
                )
        return sums, flags

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return `numbers`: there is one rank."""
        return numbers

    def settle(self) -> None:
        """Do nothing: the parameters are always consistent."""

    def state(self) -> list[Piece]:
        """Return the whole state."""
        return pieces_of(self.replica.arena, self._state, 0, 1)

    def load(self, saved: SavedState) -> None:
        """Request the whole state."""
        request_state(self.replica.arena, self._state, saved)
        warn_of_residuals(saved)

    def close(self) -> None:
        """Do nothing: there are no threads."""
