"""A model in an arena: the interface that an engine needs of any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple, Protocol

import numpy as np

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.arena import Arena
from hpctrain.hardware.memory import available_bytes
from hpctrain.transport.shared_memory.host import aligned_zeros

START_BYTES = 8  #: of a parameter's start value, float64


class Batch(NamedTuple):
    """Samples `x` (n, ...) with their labels `y` (n,); n may be 0."""

    x: np.ndarray
    y: np.ndarray


class Replica(Protocol):
    """A model whose parameters and gradients lie in an arena."""

    @property
    def arena(self) -> Arena:
        """The arena of parameters and gradients; another one after `move`."""

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient of `scale` times the summed loss into `arena.grad`.

        `on_ready(name)` is called once per slot, when its gradient is final. Random
        numbers depend on `key` alone.
        """

    def evaluate(self, batch: Batch) -> nn.Sums:
        """Return the sums of loss and of right answers over `batch`, without a gradient."""

    def move(self, **planes: np.ndarray) -> None:
        """Move `param` or `grad` of the arena to another array, with its values.

        Only an engine does, before training: the memory of gradients decides how they are sent.
        """


class ModelReplica:
    """A Replica of one of our own models."""

    def __init__(
        self, model: nn.Model, seed: int, dtype: np.typing.DTypeLike, on_gpu: bool = False
    ):
        """Lay `model` out in an arena of `dtype`, with the initial values that `seed` gives.

        `on_gpu`: on the device that is current; batches may then lie in either memory.
        """
        self.model = model
        must_fit(model, 0 if on_gpu else np.dtype(dtype).itemsize)
        shapes = {name: p.shape for name, p in model.parameters.items()}
        buffers = {name: p.shape for name, p in model.buffers.items()}
        self.arena = arenas.make(shapes, dtype, buffers, xp.zeros if on_gpu else aligned_zeros)
        self.micro_batches = 1  #: pieces that a batch is computed in: more need less memory
        self._bind_views()
        for own in (model.parameters, model.buffers):
            for name, values in nn.initial_values(own, seed).items():
                xp.copy(self._params[name], values)

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena, as the sum over micro-batches; see Replica."""
        sums = nn.Sums(0.0, 0, 0)
        for i, (piece, first) in enumerate(in_pieces(batch, self.micro_batches)):
            piece_key = key._replace(first=key.first + first)
            ready = on_ready if i == self.micro_batches - 1 else ignore_ready
            piece_sums = self.model.gradient(
                self._params, self._grads, *piece, scale, piece_key, ready, accumulate=i > 0
            )
            sums = nn.add(sums, piece_sums)
        return sums

    def evaluate(self, batch: Batch) -> nn.Sums:
        """Return the sums over `batch`; see Replica."""
        return self.model.evaluate(self._params, *batch)

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        for name, x in planes.items():
            xp.copy(x, getattr(self.arena, name))
        self.arena = replace(self.arena, **planes)  # type: ignore[arg-type]
        self._bind_views()

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Return the model's outputs for samples `x` (n, ...): logits (n, classes), a new array."""
        return xp.to_host(self.model.outputs(self._params, x))

    def _bind_views(self) -> None:
        """Find the tensors in the planes."""
        self._params = self.arena.views(self.arena.param) | self.arena.views(self.arena.buffer)
        self._grads = self.arena.views(self.arena.grad)


def in_pieces(batch: Batch, pieces: int) -> Iterator[tuple[Batch, int]]:
    """Yield `pieces` parts of `batch`, each with the index of its first sample.

    As many on each rank, even where some are empty: a layer may sum over ranks in each.
    """
    n = len(batch.y)
    for i in range(pieces):
        start, stop = n * i // pieces, n * (i + 1) // pieces
        yield Batch(batch.x[start:stop], batch.y[start:stop]), start


def must_fit(model: nn.Model, itemsize: int) -> None:
    """Raise UsageError if the model does not fit into memory, before any allocation.

    Its start values are float64, and its two planes of `itemsize` lie beside them while they are
    copied; with 0 they lie on a device, which raises its own error. The memory of other ranks and
    of the optimizer comes on top: a model refused here fits in no case.
    """
    numbers = sum(prod(p.shape) for p in model.parameters.values())
    needed, free = numbers * (START_BYTES + 2 * itemsize), available_bytes()
    if free is not None and needed > free:
        raise UsageError(
            f"[model] the model has {numbers:,} parameters, which need {needed:,} bytes, but only "
            f"{free:,} bytes of memory are available here; expected a smaller model"
        )


def ignore_ready(name: str) -> None:
    """Do nothing: an `on_ready` for gradients that are not sent during backward."""
