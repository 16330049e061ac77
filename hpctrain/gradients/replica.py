"""A model in an arena: the interface of models for engines, and its implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.core.trees import arrays, map_arrays
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.arena import Arena
from hpctrain.hardware.memory import available_bytes
from hpctrain.nn.metrics.metric import Observer
from hpctrain.nn.part import GradientSums
from hpctrain.transport.shared_memory.host import aligned_zeros

INITIAL_VALUE_BYTES = 8  #: per element: initial values are float64


class Batch(NamedTuple):
    """`n` samples and their targets: arrays (n, ...), or trees of such; n may be 0."""

    inputs: Any
    targets: Any
    n: int

    @classmethod
    def of(cls, inputs: Any, targets: Any) -> Batch:
        """Return the Batch of the samples of a data set; raise UsageError for unequal lengths."""
        leaves = arrays((inputs, targets))
        n = len(leaves[0][1])
        for path, array in leaves:
            if len(array) != n:
                raise UsageError(
                    f"expected arrays of {n} samples, as the first one, from `rows` of the data "
                    f"set, seen {len(array)} in (x, y){path}"
                )
        return cls(inputs, targets, n)

    def part(self, start: int, stop: int) -> Batch:
        """Return the samples `start` .. `stop - 1`."""
        take_slice = itemgetter(slice(start, stop))
        return Batch(
            map_arrays(take_slice, self.inputs), map_arrays(take_slice, self.targets), stop - start
        )


class Bytes(NamedTuple):
    """Bytes of memory of a kind, of one rank."""

    measured: int
    predicted: int


Memory = dict[str, Bytes]  #: of a rank, by kind


class Replica(Protocol):
    """A model whose parameters and gradients lie in an arena."""

    @property
    def loss(self) -> nn.Loss:
        """The loss: the names of the sums, and the metrics."""

    @property
    def arena(self) -> Arena:
        """The arena of parameters and gradients; `move` replaces it."""

    @property
    def normalizes_batch(self) -> bool:
        """Whether a layer uses statistics of the whole batch, as BatchNorm does."""

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient of `scale` times the summed loss into `arena.grad`.

        `on_ready(name)` is called once per slot, when its gradient is final. Random numbers depend
        on `key` alone.
        """

    def evaluate(self, batch: Batch, observe: Observer | None = None) -> nn.Sums:
        """Return the sums of the loss over `batch`, without a gradient.

        `observe(outputs, targets)` is called with all outputs in turn, a few at a time, on the host
        and with the axis of classes last; targets of the class -1 do not count.
        """

    def move(self, **planes: np.ndarray) -> None:
        """Move `param` or `grad` of the arena to another array, with its values.

        For engines, before training: shared memory or device memory is needed to send gradients.
        """


class WrappedReplica:
    """A Replica that takes its arena, and all but its gradient and its loss, from another one."""

    def __init__(self, replica: Replica):
        self._replica = replica

    @property
    def arena(self) -> Arena:
        """The arena of the replica."""
        return self._replica.arena

    @property
    def normalizes_batch(self) -> bool:
        """Whether the replica normalizes over the batch."""
        return self._replica.normalizes_batch

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        self._replica.move(**planes)

    def evaluate(self, batch: Batch, observe: Observer | None = None) -> nn.Sums:
        """Return the sums over `batch`; see Replica."""
        return self._replica.evaluate(batch, observe)


class TrainableModel(Protocol):
    """A model as the Trainer takes it: an `nn.Model`, or a model of another framework."""

    loss: nn.Loss
    input_shape: Any  #: of one sample: a tuple, or a tree of such; None: not known yet

    @property
    def parameter_count(self) -> int:
        """The number of trained numbers."""

    @property
    def targets(self) -> int:
        """The number of targets per sample, as `Sums` counts them."""

    @property
    def normalizes_batch(self) -> bool:
        """Whether a layer uses statistics of the whole batch, as BatchNorm does."""

    def output_shape_for(self, samples: Any) -> tuple[int, ...]:
        """Return the output's shape for one of `samples`; raise UsageError if they do not fit."""

    def metric_example(self, samples: Any) -> tuple[np.ndarray, Any]:
        """Return outputs and targets of a few samples as metrics get them; may raise UsageError."""


class ModelReplica:
    """The Replica of an nn.Model in float32 or float64."""

    def __init__(
        self, model: nn.Model, seed: int, dtype: np.typing.DTypeLike, on_gpu: bool = False
    ):
        """Create the arena of `model` in `dtype`, with initial values from `seed`.

        With `on_gpu` the arena lies on the current device; batches may lie in either memory.
        """
        self.model, self.loss = model, model.loss
        require_memory(model, 0 if on_gpu else np.dtype(dtype).itemsize)
        shapes = {name: p.shape for name, p in model.parameters.items()}
        buffers = {name: p.shape for name, p in model.buffers.items()}
        zeros = xp.zeros if on_gpu else aligned_zeros
        self.arena = arenas.make_arena(shapes, dtype, buffers, zeros)
        self.micro_batches = 1  #: pieces of a batch, computed in turn; more pieces need less memory
        self._bind_views()
        for parameters in (model.parameters, model.buffers):
            for name, values in nn.initial_values(parameters, seed).items():
                xp.copy(self._params[name], values)

    @property
    def normalizes_batch(self) -> bool:
        """Whether a layer uses statistics of the whole batch."""
        return self.model.normalizes_batch

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena, as the sum over micro-batches; see Replica."""
        metric_sums: nn.Sums = {}
        scale *= mean_factor(self.loss, batch, key)
        params, views = needed(key, self._params), needed(key, self._grads)
        grads = GradientSums(self.model.whole, views, self.micro_batches, on_ready)
        for piece, first in split_batch(batch, self.micro_batches):
            piece_key = key._replace(first=key.first + first)
            piece_sums = self.model.add_gradient(
                params, grads, piece.inputs, piece.targets, scale, piece_key
            )
            metric_sums = nn.add(metric_sums, piece_sums)
        return metric_sums

    def evaluate(self, batch: Batch, observe: Observer | None = None) -> nn.Sums:
        """Return the sums over `batch`; see Replica."""
        return self.model.evaluate(self._params, batch.inputs, batch.targets, observe)

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        self.arena = move_planes(self.arena, planes)
        self._bind_views()

    def predict(self, x: Any) -> np.ndarray:
        """Return the model's outputs for samples `x` (n, ...): logits (n, classes), a new array."""
        return xp.to_host(self.model.outputs(self._params, x))

    def _bind_views(self) -> None:
        """Create a view of each tensor in the planes."""
        self._params = self.arena.views(self.arena.param) | self.arena.views(self.arena.buffer)
        self._grads = self.arena.views(self.arena.grad)


def mean_factor(loss: Any, batch: Batch, key: nn.Key) -> float:
    """Return the factor of the scale of `batch` for a loss that is no mean over targets.

    Its sum is divided by the weights of all targets of a step, say. Collective for such a loss.
    """
    method = getattr(loss, "mean_factor", None)
    return 1.0 if method is None else method(batch, key)


def split_batch(batch: Batch, pieces: int) -> Iterator[tuple[Batch, int]]:
    """Yield `pieces` parts of `batch`, each with the index of its first sample.

    Each rank yields the same number of pieces, some perhaps empty: a layer may sum over ranks in
    each piece.
    """
    if pieces == 1:
        yield batch, 0
        return
    for i in range(pieces):
        start, stop = batch.n * i // pieces, batch.n * (i + 1) // pieces
        yield batch.part(start, stop), start


def require_memory(model: nn.Model, itemsize: int) -> None:
    """Raise UsageError if the model does not fit into memory, before any allocation.

    Counted are the initial values in float64 and two planes of `itemsize`, which exist at the same
    time. Planes on a device have `itemsize` 0 here: its allocator raises its own error. Memory of
    other ranks and of the optimizer is not counted, so a model refused here cannot fit.
    """
    element_count = sum(prod(p.shape) for p in model.parameters.values())
    needed_bytes = element_count * (INITIAL_VALUE_BYTES + 2 * itemsize)
    free_bytes = available_bytes()
    if free_bytes is not None and needed_bytes > free_bytes:
        raise UsageError(
            f"[model] the model has {element_count:,} parameters, which need "
            f"{needed_bytes:,} bytes, but only {free_bytes:,} bytes of memory are available here; "
            "expected a smaller model"
        )


def move_planes(arena: Arena, planes: Mapping[str, np.ndarray]) -> Arena:
    """Return `arena` with other arrays as some of its planes, which get their values."""
    for name, x in planes.items():
        xp.copy(x, getattr(arena, name))
    return replace(arena, **planes)  # type: ignore[arg-type]


def need_all(key: nn.Key, names: Iterable[str]) -> None:
    """Need the slots of all `names` now; see `Key.on_need`."""
    if key.on_need is not None:
        for name in names:
            key.on_need(name)


class NeededArrays(Mapping[str, Any]):
    """Arrays of slots; each slot is needed before its array is handed out, see `Key.on_need`.

    So a sum that waits for its update is applied before the parameter is read, and before the next
    gradient is written where the sum lies, whatever a user's model calls.
    """

    def __init__(self, on_need: Callable[[str], None], arrays: Mapping[str, Any]):
        self._on_need, self._arrays = on_need, arrays

    def __getitem__(self, name: str) -> Any:
        """Need slot `name`; return its array."""
        self._on_need(name)
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def needed(key: nn.Key, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `arrays`, as NeededArrays if updates wait for `key.on_need`."""
    return arrays if key.on_need is None else NeededArrays(key.on_need, arrays)


def ignore_ready(name: str) -> None:
    """Do nothing: the `on_ready` for gradients that are not sent during backward."""
