"""The state of one worker where workers train apart: parameters and the optimizer's state.

Between two calls of `train` the arena holds the parameters that are evaluated and saved, such as
the mean over workers, and a copy holds the worker's own planes. A checkpoint has both: "param" is
the plane of the arena, "worker.3.param" the plane of worker 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.core.xp import like
from hpctrain.engines.engine import fitting, identity_total, load_into
from hpctrain.gradients.arena import Arena
from hpctrain.optim import Optimizer


class WorkerState:
    """The planes and the optimizer state of one worker."""

    def __init__(self, arena: Arena, optimizer: Optimizer, worker: int, workers: int):
        self.state = optimizer.init(arena.param)
        self._arena, self._optimizer, self._workers = arena, optimizer, workers
        self._prefix = f"worker.{worker}."
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
        arrays = {**self._own_planes, **{f"optimizer.{name}": x for name, x in self.state.items()}}
        return [Piece(self._prefix + name, 0, x.size, x) for name, x in arrays.items()]

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the common planes, and this worker's own if the number of workers is the same.

        Otherwise workers begin with the common planes and the mean of the optimizer states.
        """
        saved_workers, prefix = count_workers(arrays), self._prefix
        own_arrays = {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}
        if saved_workers != self._workers:
            own_arrays = mean_states(arrays, self.state, saved_workers)
        moments = {name: x for name, x in own_arrays.items() if name not in self._planes}
        load_into(self._arena, self.state, {**arrays, **moments})
        self._own_planes = {
            name: like(x, fitting(own_arrays, name, x.size)).copy()
            for name, x in self._planes.items()
            if name in own_arrays
        }


def count_workers(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the number of workers with an optimizer state of their own in a checkpoint."""
    return sum(name.startswith("worker.") and name.endswith(".optimizer.step") for name in arrays)


def mean_states(
    arrays: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray], workers: int
) -> dict[str, np.ndarray]:
    """Return the means of the optimizer states of `workers`; empty if there are none."""
    means = {}
    for name in state if workers else ():
        keys = [f"worker.{i}.optimizer.{name}" for i in range(workers)]
        if arrays.keys() >= set(keys):
            means[f"optimizer.{name}"] = np.mean([arrays[key] for key in keys], axis=0)
    return means


def common_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the `arrays` of a checkpoint, with the mean of each array that all workers have.

    A regime with one common state can then resume a run whose workers trained apart.
    """
    means = {}
    for name in (key.removeprefix("worker.0.") for key in arrays if key.startswith("worker.0.")):
        if name not in arrays:
            worker_arrays = [x for key, x in arrays.items() if _is_worker_array(key, name)]
            means[name] = np.mean(worker_arrays, axis=0).astype(worker_arrays[0].dtype)
    return {**arrays, **means}


def _is_worker_array(key: str, name: str) -> bool:
    return key.startswith("worker.") and key.split(".", 2)[2] == name
