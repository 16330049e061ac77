"""A worker's own state where workers train apart: parameters and the optimizer's state.

Between trainings the arena holds the parameters that are evaluated and saved, such as a mean over
workers, and the worker's own planes are kept aside. A checkpoint has both: "param" is the former,
"worker.3.param" the plane of worker 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.core.xp import like
from hpctrain.engines.engine import fitting, load_into, whole
from hpctrain.gradients.arena import Arena
from hpctrain.optim import Optimizer


class Apart:
    """One worker's own planes and optimizer."""

    def __init__(self, arena: Arena, optimizer: Optimizer, worker: int, workers: int):
        self.state = optimizer.init(arena.param)
        self._arena, self._optimizer, self._workers = arena, optimizer, workers
        self._prefix = f"worker.{worker}."
        planes = {"param": arena.param, "buffer": arena.buffer}
        self._planes = {name: x for name, x in planes.items() if x.size}
        self._aside: dict[str, np.ndarray] = {}

    def put_aside(self) -> None:
        """Keep a copy of the planes."""
        self._aside = {name: x.copy() for name, x in self._planes.items()}

    def take_up(self) -> None:
        """Bring the planes that were put aside, if any were, back into the arena."""
        for name, x in self._aside.items():
            self._planes[name][...] = x
        self._aside = {}

    def update(self, param: np.ndarray) -> None:
        """Update `param` with the arena's gradient, by this worker's optimizer."""
        arena = self._arena
        self._optimizer.update(arena.grad, self.state, param, arena.slots, whole)

    def pieces(self) -> list[Piece]:
        """Return the pieces of this worker to be saved; its planes have been put aside."""
        named = {**self._aside, **{f"optimizer.{name}": x for name, x in self.state.items()}}
        return [Piece(self._prefix + name, 0, x.size, x) for name, x in named.items()]

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the common planes into the arena and, if as many workers saved, this worker's own.

        Otherwise workers begin with the common planes and the mean of the optimizers' states.
        """
        before, prefix = workers_in(arrays), self._prefix
        own = {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}
        if before != self._workers:
            own = mean_states(arrays, self.state, before)
        moments = {name: x for name, x in own.items() if name not in self._planes}
        load_into(self._arena, self.state, {**arrays, **moments})
        self._aside = {
            name: like(x, fitting(own, name, x.size)).copy()
            for name, x in self._planes.items()
            if name in own
        }


def workers_in(arrays: Mapping[str, np.ndarray]) -> int:
    """Return how many workers saved optimizers of their own: the step count of each is one."""
    return sum(name.startswith("worker.") and name.endswith(".optimizer.step") for name in arrays)


def mean_states(
    arrays: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray], workers: int
) -> dict[str, np.ndarray]:
    """Return the means of the optimizers' states of `workers`; none where none were saved."""
    means = {}
    for name in state if workers else ():
        own = [f"worker.{i}.optimizer.{name}" for i in range(workers)]
        if arrays.keys() >= set(own):
            means[f"optimizer.{name}"] = np.mean([arrays[key] for key in own], axis=0)
    return means


def for_any_engine(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the `arrays` of a checkpoint, and the means of arrays that each worker has its own of.

    So a regime with one common state can resume from workers that trained apart.
    """
    shared = dict(arrays)
    for name in (key.removeprefix("worker.0.") for key in arrays if key.startswith("worker.0.")):
        if name not in arrays:
            own = [x for key, x in arrays.items() if _is_of_a_worker(key, name)]
            shared[name] = np.mean(own, axis=0).astype(own[0].dtype)
    return shared


def _is_of_a_worker(array: str, name: str) -> bool:
    return array.startswith("worker.") and array.split(".", 2)[2] == name
