"""The interface of layers: the contract between layers and the model that chains them.

A layer is a frozen description: sizes and options, no arrays. Parameters, gradients and the values
saved for backward are all passed as arguments, so that any number of ranks and threads can share a
layer object, and the caller chooses the memory of the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from math import prod
from operator import methodcaller
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace

MAX_LAYERS = 10_000  #: a recipe with a larger number of blocks is a mistake, and takes all memory
Shape = tuple[int, ...]
Init = Callable[[np.random.Generator, Shape], np.ndarray]
Product = Callable[[], object]  #: writes gradients of parameters, which no other layer reads
Later = Callable[[Product], object]  #: runs a product, at once or later

#: The `Later` that runs each product at once; a C function, so it costs no Python call per product.
run_now: Later = methodcaller("__call__")


#: Returns the sums of a few float64 over all ranks, the same bytes on each rank; collective.
SumOverRanks = Callable[[np.ndarray], np.ndarray]


class Key(NamedTuple):
    """The step that a layer computes; the first four fields determine its random numbers."""

    seed: int
    step: int
    first: int  #: index of this share's first sample in the global batch of the step
    layer: int = 0  #: number of the layer that draws; set by the model
    sum_over_ranks: SumOverRanks | None = None  #: None: this share is the whole batch
    recomputed: bool = False  #: a repeated forward pass, which must not update running statistics
    samples: int = 0  #: number of samples in the global batch of the step
    on_need: Callable[[str], None] | None = (
        None  #: called with a parameter's name before its first use
    )
    mean_factor: float | None = None  #: of a loss that is no mean over samples, if known before


@dataclass(frozen=True)
class Parameter:
    """One array of a layer: its shape, and `init(generator, shape)`, which returns float64 values.

    An array that is not `trainable` is a buffer: `forward` writes it, and it has no gradient.
    `shared_with` is the full name of a parameter of an earlier layer whose array this layer shares.
    `wide` parameters and all buffers keep 32 bits where other parameters and samples have 16.
    """

    shape: Shape
    init: Init
    trainable: bool = True
    shared_with: str | None = None
    wide: bool = False


class Layer(Protocol):
    """One step of a model; shapes describe one sample, arrays have the batch as first dim."""

    def output_shape(self, shape: Shape) -> Shape:
        """Return the output shape for samples of `shape`; raise UsageError if they do not fit."""

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        """Return the parameters and buffers for samples of `shape`, in a fixed order."""

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Any]:
        """Return the output and the values saved for `backward`; `key` None means evaluation.

        Writes neither `x` nor parameters; in training it may write the buffers in `p`. Arrays have
        the dtype of the parameters.
        """

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Any, dy: Array, want_dx: bool
    ) -> Array | None:
        """Overwrite the contiguous arrays `g` with the gradients; return dL/dx.

        `dy` is dL/dy and is not written. Without `want_dx` the returned value is undefined.

        A layer may take a sixth argument, `later: Later = run_now`, and pass it products that write
        into `g`: a pipeline runs them when it would wait otherwise. A product reads only arrays
        that nobody writes after this call, and keeps no others alive.
        """


class LazyArrays(Mapping[str, Array]):
    """Arrays by name, each created when it is first read: waiting products then need no memory."""

    def __init__(self, makers: Mapping[str, Callable[[], Array]]):
        self._makers = makers
        self._arrays: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            self._arrays[name] = self._makers[name]()
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def select(self, prefix: str) -> LazyArrays:
        """Return the arrays whose names begin with `prefix`, without creating them."""
        return LazyArrays(
            {
                name.removeprefix(prefix): partial(self.__getitem__, name)
                for name in self
                if name.startswith(prefix)
            }
        )


class PlainLayer:
    """The part that layers without parameters share; by default the shape of samples stays."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return {}


@cache
def takes_later(layer_type: type) -> bool:
    """Return whether the method `backward` of a type of layers takes `later`."""
    return "later" in signature(layer_type.backward).parameters  # type: ignore[attr-defined]


def he_normal(fan_in: int) -> Init:
    """Return an init of normal values with variance 2/fan_in, for use before a ReLU (He, 2015)."""
    return lambda generator, shape: generator.standard_normal(shape) * np.sqrt(2.0 / fan_in)


def normal(std: float) -> Init:
    """Return an init of normal values with standard deviation `std`."""
    return lambda generator, shape: generator.standard_normal(shape) * std


def ones(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return ones, the initial values of factors."""
    return np.ones(shape)


def zeros(generator: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return zeros, the initial values of biases."""
    return np.zeros(shape)


def require_at_least(layer: object, **limits: tuple[int, int]) -> None:
    """Raise UsageError for the first `name=(value, minimum)` whose value is below `minimum`."""
    for name, (value, minimum) in limits.items():
        if value < minimum:
            layer_name = type(layer).__name__
            raise UsageError(f"{layer_name}: {name} must be at least {minimum}, seen {value}")


def rows_of(x: Array) -> Array:
    """Return `x` (..., m) as (rows, m)."""
    # NumPy cannot infer a size given as -1 for a share without samples.
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def sum_rows(x: Array, out: Array) -> None:
    """Write the sum of the rows of `x` (n, m) into `out` (m,)."""
    # A matrix product: np.sum over the first axis of a tall array is up to 20 times slower.
    xp = namespace(x)
    xp.matmul(xp.ones(len(x), x.dtype), x, out=out)


def write_affine_gradients(
    g: Mapping[str, Array], x: Array, dy: Array, weight: str = "weight", bias: str = "bias"
) -> None:
    """Write the gradients of y = x W + b into `g`, from x (n, inputs) and dy (n, outputs)."""
    # BLAS reads the transpose in place and writes directly into the gradient's slot.
    out = g[weight].reshape(x.shape[1], dy.shape[1])
    namespace(dy).matmul(x.T, dy, out=out)
    if bias in g:
        sum_rows(dy, out=g[bias])


def initial_values(
    parameters: Mapping[str, Parameter], seed: int, names: Container[str] | None = None
) -> dict[str, np.ndarray]:
    """Return the initial values of each parameter, float64; they depend on `seed` and shapes alone.

    Each parameter has its own random stream, so a new shape of one parameter changes no value of
    another, and the parameters `names`, by default all, may be drawn alone.
    """
    return {
        name: parameter.init(
            np.random.Generator(np.random.Philox(key=np.array([seed, i], np.uint64))),
            parameter.shape,
        )
        for i, (name, parameter) in enumerate(parameters.items())
        if names is None or name in names
    }
