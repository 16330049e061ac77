"""A model with closed-form training, |w - b|^2 / 2: expected parameters follow from NumPy.

Each worker has another b in each step, so that nobody can stand in for anybody else.
"""

from __future__ import annotations

import time

import numpy as np

from hpctrain import nn
from hpctrain.engines import Flags, Task
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.replica import Batch

LENGTH = 3008


def target(worker: int, step: int) -> np.ndarray:
    """Return b, float64 (LENGTH,)."""
    return np.random.default_rng((worker, step)).normal(worker, 1.0, LENGTH)


class Quadratic:
    """A Replica whose batch is b, and whose parameters begin with 0, 1, 2, ..."""

    loss = nn.mean_squared_error

    def __init__(self, dtype: np.typing.DTypeLike = np.float64):
        self.arena = arenas.make_arena({"w": (LENGTH,)}, dtype, {"b": (8,)})
        self.arena.param[:] = np.arange(LENGTH)

    def gradient(self, batch, scale, key, on_ready):
        time.sleep(2e-4)  # or the first rank would be through before the last begins
        self.arena.grad[:] = scale * (self.arena.param - batch.inputs)
        self.arena.buffer[:] = key.step
        return {"loss": nn.Total(float(np.square(self.arena.grad).sum() / 2), 1)}

    def evaluate(self, batch, observe=None):
        return {}


class Targets:
    """The work of one worker; from its `count`-th task on it says `flags`, or has a loss of nan."""

    max_drops = 0

    def __init__(self, worker: int | None, flags: Flags = Flags(), count: int = 0):  # noqa: B008
        self.worker, self.tasks = worker, 0
        self._flags, self._count = flags, count

    @property
    def _said(self) -> Flags:
        return self._flags if 0 < self._count <= self.tasks else Flags()

    def task(self, step):
        self.tasks += 1
        b = target(self.worker, step)
        if self._said.failed:
            b[0] = np.nan
        return Task(Batch(b, np.zeros(1, np.int64), 1), 1.0, nn.Key(0, step, 0))

    def record(self, step, sums):
        self.step = step

    def flags(self):
        return self._said._replace(failed=0)
