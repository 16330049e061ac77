"""A model in an arena: what an engine needs of any model, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from hpctrain import nn
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.arena import Arena


class Batch(NamedTuple):
    """Samples `x` (n, ...) with their labels `y` (n,); n may be 0."""

    x: np.ndarray
    y: np.ndarray


class Replica(Protocol):
    """A model whose parameters and gradients lie in an arena."""

    arena: Arena

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient of `scale` times the summed loss into `arena.grad`.

        `on_ready(name)` is called once per slot, when nothing more will be added to it. Random
        numbers depend on `key` alone.
        """

    def evaluate(self, batch: Batch) -> nn.Sums:
        """Return the sums of loss and of right answers over `batch`, without a gradient."""


class ModelReplica:
    """A Replica made of one of our own models."""

    def __init__(self, model: nn.Model, seed: int, dtype: np.typing.DTypeLike):
        """Lay `model` out in an arena of `dtype`, with the initial values that `seed` gives."""
        self.model = model
        shapes = {name: p.shape for name, p in model.parameters.items()}
        self.arena = arenas.make(shapes, dtype)
        self._params = self.arena.views(self.arena.param)
        self._grads = self.arena.views(self.arena.grad)
        for name, values in nn.initial_values(model.parameters, seed).items():
            self._params[name][...] = values

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena; see Replica."""
        return self.model.gradient(self._params, self._grads, *batch, scale, key, on_ready)

    def evaluate(self, batch: Batch) -> nn.Sums:
        """Return the sums over `batch`; see Replica."""
        return self.model.evaluate(self._params, *batch)

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Return the model's outputs for samples `x` (n, ...): logits (n, classes), a new array."""
        return self.model.outputs(self._params, x)
