"""A worker's state where workers train apart: parameters and the optimizer's state.

    apart       the arena holds this worker's own planes
    averaged    the arena holds the mean over workers, from which all continue
    settled     the arena holds the mean over workers, or another plane to evaluate and save, and a
                copy holds the worker's own planes, from which it continues

A checkpoint of settled workers has both: "param" is the plane of the arena, "worker.3.param" the
plane of worker 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.core.xp import namespace
from hpctrain.engines.saved_state import SavedState, array_pieces, request_array, request_state
from hpctrain.gradients.arena import Arena
from hpctrain.optim import Optimizer
from hpctrain.optim.optimizer import State


class WorkerState:
    """The planes and the optimizer state of a worker."""

    def __init__(self, arena: Arena, optimizer: Optimizer, state: State, worker: int, workers: int):
        """`state` is the optimizer's state of this worker."""
        self.state = state
        self.states_differ = True  #: whether the optimizer states of workers may differ
        self._params_differ = False  # whether the planes in the arenas of workers may differ
        self._arena, self._optimizer = arena, optimizer
        self._worker, self._workers = worker, workers
        planes = {"param": arena.param, "buffer": arena.buffer}
        self.planes = {name: x for name, x in planes.items() if x.size}
        self._own_planes: dict[str, np.ndarray] = {}

    def train_apart(self) -> None:
        """Begin steps of this worker alone, after `restore_planes`."""
        self._params_differ = self.states_differ = True

    def set_averaged(self, with_states: bool) -> None:
        """Note that all arenas hold the mean; `with_states` also the states of the optimizer."""
        self._params_differ, self.states_differ = False, not with_states

    def settle(self, average: Callable[[Iterable[np.ndarray]], None]) -> None:
        """Average the workers' planes into the arena, if they differ; keep the own planes."""
        if self._params_differ:
            self._params_differ = False
            self.save_planes()
            average(self.planes.values())

    def save_planes(self) -> None:
        """Copy the planes out of the arena."""
        self._own_planes = {name: x.copy() for name, x in self.planes.items()}

    def restore_planes(self) -> None:
        """Copy the saved planes, if any, back into the arena."""
        for name, x in self._own_planes.items():
            self.planes[name][...] = x
        self._params_differ |= bool(self._own_planes)
        self._own_planes = {}

    def update(self, param: np.ndarray) -> None:
        """Update `param` with the arena's gradient, by this worker's optimizer."""
        arena = self._arena
        self._optimizer.update(arena.grad, self.state, param, arena.layout, arena.gather_rows)

    def pieces(self) -> list[Piece]:
        """Return this worker's own pieces of a checkpoint, after its planes were saved."""
        state = self.state if self.states_differ else {}
        named_arrays = {**self._own_planes, **{f"optimizer.{name}": x for name, x in state.items()}}
        prefix = f"worker.{self._worker}."
        arrays = named_arrays.items()
        return [p for name, x in arrays for p in array_pieces(self._arena, prefix + name, x, 0, 1)]

    def load(self, saved: SavedState) -> None:
        """Request the common planes, and this worker's own if the number of workers is the same.

        Otherwise workers begin with the common planes and the mean of the optimizer states.
        """
        own_name = partial(saved.own_name, worker=self._worker, workers=self._workers)
        request_state(self._arena, {}, saved)
        for name, x in self.state.items():
            request_array(self._arena, own_name(f"optimizer.{name}"), x, saved.request)
        planes = {name: x for name, x in self.planes.items() if own_name(name) != name}
        self._params_differ = False
        self._own_planes = {name: namespace(x).zeros_like(x) for name, x in planes.items()}
        for name, x in self._own_planes.items():
            request_array(self._arena, own_name(name), x, saved.request)
