"""The state of one worker where workers train apart: parameters and the optimizer's state.

Between two calls of `train` the arena holds the parameters that are evaluated and saved, such as
the mean over workers, and a copy holds the worker's own planes. A checkpoint has both: "param" is
the plane of the arena, "worker.3.param" the plane of worker 3.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.core.xp import namespace
from hpctrain.engines.engine import identity_total, request_state
from hpctrain.engines.saved_state import SavedState
from hpctrain.gradients.arena import Arena
from hpctrain.optim import Optimizer


class WorkerState:
    """The planes and the optimizer state of one worker."""

    def __init__(self, arena: Arena, optimizer: Optimizer, worker: int, workers: int):
        self.state = optimizer.init(arena.param)
        self._arena, self._optimizer = arena, optimizer
        self._worker, self._workers = worker, workers
        planes = {"param": arena.param, "buffer": arena.buffer}
        self._planes = {name: x for name, x in planes.items() if x.size}
        self._own_planes: dict[str, np.ndarray] = {}

    def save_planes(self) -> None:
        """Copy the planes out of the arena."""
        self._own_planes = {name: x.copy() for name, x in self._planes.items()}

    def restore_planes(self) -> None:
        """Copy the saved planes, if any, back into the arena."""
        for name, x in self._own_planes.items():
            self._planes[name][...] = x
        self._own_planes = {}

    def update(self, param: np.ndarray) -> None:
        """Update `param` with the arena's gradient, by this worker's optimizer."""
        arena = self._arena
        self._optimizer.update(arena.grad, self.state, param, arena.slots, identity_total)

    def pieces(self) -> list[Piece]:
        """Return this worker's pieces of a checkpoint; call `save_planes` before."""
        named = {**self._own_planes, **{f"optimizer.{name}": x for name, x in self.state.items()}}
        prefix = f"worker.{self._worker}."
        return [Piece(prefix + name, 0, x.size, x) for name, x in named.items()]

    def load(self, saved: SavedState) -> None:
        """Request the common planes, and this worker's own if the number of workers is the same.

        Otherwise workers begin with the common planes and the mean of the optimizer states.
        """
        own_name = partial(saved.own_name, worker=self._worker, workers=self._workers)
        request_state(self._arena, {}, saved)
        for name, x in self.state.items():
            saved.request(own_name(f"optimizer.{name}"), x)
        planes = {name: x for name, x in self._planes.items() if own_name(name) != name}
        self._own_planes = {name: namespace(x).empty_like(x) for name, x in planes.items()}
        for name, x in self._own_planes.items():
            saved.request(own_name(name), x)
