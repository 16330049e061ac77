"""The interface of layers: the contract between them and the model that chains them.

A layer is a frozen description: sizes and options, no arrays. Parameters, gradients and the values
saved for the way back all come and go as arguments, so that any number of ranks and
threads can share a layer object, and the caller chooses the memory of the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace

MOST_LAYERS = 10_000  #: of a kind in a model: a larger number is a mistake, and takes all memory
Shape = tuple[int, ...]
Init = Callable[[np.random.Generator, Shape], np.ndarray]


#: Takes a few float64, returns their sums over all ranks, the same bytes on each; all ranks call.
SumOverRanks = Callable[[np.ndarray], np.ndarray]


class Key(NamedTuple):
    """The facts of a step for a layer; the first four alone determine its random numbers."""

    seed: int
    step: int
    first: int  #: index of this share's first sample in the global batch of the step
    layer: int = 0  #: position of the layer that draws; set by the model
    sum_over_ranks: SumOverRanks | None = None  #: None: this share is the whole batch
    again: bool = False  #: a forward pass made once more; nothing may be counted twice
    samples: int = 0  #: in the global batch of the step
    on_need: Callable[[str], None] | None = (
        None  #: called with a parameter's name before its first use
    )


@dataclass(frozen=True)
class Parameter:
    """One array of a layer: its shape, and `init(generator, shape)` that gives float64 values.

    Without `trained` it is a buffer: `forward` writes it, and no gradient moves it. `same_as` is
    the full name of a parameter of an earlier layer that this one is, not a copy of it. `wide`
    parameters, as all buffers, keep 32 bits where the others and the samples have 16.
    """

    shape: Shape
    init: Init
    trained: bool = True
    same_as: str | None = None
    wide: bool = False


class Layer(Protocol):
    """One step of a model; shapes are those of one sample, arrays have the batch in front."""

    def output_shape(self, shape: Shape) -> Shape:
        """Return the output shape for samples of `shape`; raise UsageError if they do not fit."""

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        """Return the parameters and buffers for samples of `shape`, in a fixed order."""

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Any]:
        """Return the output and the values saved for `backward`; `key` None means evaluation.

        `x` is never written, and of `p` only the buffers, if there is a key. Arrays are in
        the dtype of the parameters.
        """

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Any, dy: Array, want_dx: bool
    ) -> Array | None:
        """Write (not add) the gradients into the contiguous arrays `g`; return dL/dx.

        `dy` is dL/dy and never written. Without `want_dx` the result is undefined.
        """


def he_normal(fan_in: int) -> Init:
    """Return an init of normal values with variance 2/fan_in, right before a ReLU (He, 2015)."""
    return lambda generator, shape: generator.standard_normal(shape) * np.sqrt(2.0 / fan_in)


def normal(spread: float) -> Init:
    """Return an init of normal values with standard deviation `spread`."""
    return lambda generator, shape: generator.standard_normal(shape) * spread


def ones(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return ones: the start of every factor."""
    return np.ones(shape)


def zeros(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return zeros: the start of every bias."""
    return np.zeros(shape)


def at_least(layer: object, **limits: tuple[int, int]) -> None:
    """Raise UsageError for the first `name=(value, minimum)` whose value is below `minimum`."""
    for name, (value, minimum) in limits.items():
        if value < minimum:
            kind = type(layer).__name__
            raise UsageError(f"{kind}: {name} must be at least {minimum}, seen {value}")


def rows_of(x: Array) -> Array:
    """Return `x` (..., m) as (rows, m)."""
    # The rows are counted: -1 has no answer for a share of no samples.
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def sum_rows(x: Array, out: Array) -> None:
    """Write the sum of the rows of `x` (n, m) into `out` (m,)."""
    # As a matrix product: np.sum over the first axis of a tall array is up to 20 times slower.
    xp = namespace(x)
    xp.matmul(xp.ones(len(x), x.dtype), x, out=out)
