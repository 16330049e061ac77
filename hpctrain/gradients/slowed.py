"""A replica slowed down by the planted faults of a run, with the same results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain import nn
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.faults import Pace
from hpctrain.gradients.replica import Batch, Replica


class SlowedReplica:
    """A Replica whose gradients are those of `replica`, later.

    A part of the gradient is ready when the compute before it has taken its time, so that what
    overlaps with backward still does.
    """

    def __init__(self, replica: Replica, pace: Pace):
        self._replica, self._pace = replica, pace

    @property
    def arena(self) -> Arena:
        """The arena of `replica`."""
        return self._replica.arena

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        self._replica.move(**planes)

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena, and take longer over it; see Replica."""
        self._pace.begin(key.seed, key.step)
        if key.sum_over_ranks is not None:  # a rank waits for the others in it
            key = key._replace(sum_over_ranks=self._pace.outside(key.sum_over_ranks))
        if key.on_need is not None:
            key = key._replace(on_need=self._pace.outside(key.on_need))
        sums = self._replica.gradient(batch, scale, key, self._pace.outside(on_ready))
        self._pace.catch_up()
        return sums

    def evaluate(self, batch: Batch) -> nn.Sums:
        """Return the sums over `batch`, at full speed; see Replica."""
        return self._replica.evaluate(batch)
