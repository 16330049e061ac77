"""A model: layers in a row and a loss; arrays in, gradients out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.nn.layer import Key, Layer, Parameter, Shape
from hpctrain.nn.losses import Loss, Sums, add, cross_entropy
from hpctrain.xp import Array, namespace

EVALUATION_ROWS = 256  #: samples at once in `evaluate`; bounds the memory whatever the test set

__all__ = ["Key", "Model", "initial_values"]


class Model:
    """Layers in a row: a description without arrays, shared freely by ranks and threads.

    `layers` maps names to layers, first layer first; `input_shape` is that of one sample, without
    the batch. Raises UsageError where a layer cannot take what the one before it gives.
    """

    def __init__(
        self, layers: Mapping[str, Layer], input_shape: Shape, loss: Loss = cross_entropy
    ) -> None:
        self.layers = dict(layers)
        self.input_shape = tuple(input_shape)
        self.loss = loss
        shapes = _shapes(self.layers, self.input_shape)
        self.output_shape = shapes[-1]
        self.parameters: dict[str, Parameter] = {}
        self._names: list[dict[str, str]] = []  # per layer: its own word for each, and the model's
        for (name, layer), shape in zip(self.layers.items(), shapes[:-1], strict=True):
            own = layer.parameters(shape)
            self.parameters |= {f"{name}.{word}": one for word, one in own.items()}
            self._names.append({word: f"{name}.{word}" for word in own})
        if not self.parameters:
            raise UsageError("a model needs a layer with parameters, seen none")

    def gradient(
        self,
        params: Mapping[str, Array],
        grads: Mapping[str, Array],
        x: Array,
        y: Array,
        scale: float,
        key: Key,
        on_ready: Callable[[str], None],
    ) -> Sums:
        """Write the gradient of `scale` times the summed loss of a batch into `grads`.

        `params` and `grads` hold an array per parameter, all of one dtype, float32 or float64;
        `grads` must be contiguous and is overwritten, also by a batch of no samples (with zeros).
        `x` is (n, *input_shape) in any real dtype, `y` is (n,) integers; neither is written.
        `on_ready(name)` is called once per parameter, directly after its last write, the last
        layer's first. Raises UsageError if samples have another shape than `input_shape`.
        """
        x = self._samples(params, x)
        tape: list[Any] = []
        for i, layer in enumerate(self.layers.values()):
            x, saved = layer.forward(self._own(i, params), x, key._replace(layer=i))
            tape.append(saved)
        sums, dy = self.loss(x, namespace(x).asarray(y), scale)
        self._backward(params, grads, tape, dy, on_ready)
        return sums

    def evaluate(self, params: Mapping[str, Array], x: Array, y: Array) -> Sums:
        """Return the sums of a data set; arrays as in `gradient`, with nothing dropped out."""
        sums = Sums(0.0, 0, 0)
        for start in range(0, len(x), EVALUATION_ROWS):
            piece = slice(start, start + EVALUATION_ROWS)
            outputs = self.outputs(params, x[piece])
            sums = add(sums, self.loss(outputs, namespace(outputs).asarray(y[piece]), None)[0])
        return sums

    def outputs(self, params: Mapping[str, Array], x: Array) -> Array:
        """Return what the last layer says of `x`, (n, *output_shape), with nothing dropped out."""
        z = self._samples(params, x)
        for i, layer in enumerate(self.layers.values()):
            z, _ = layer.forward(self._own(i, params), z, None)
        return z

    def _backward(
        self,
        params: Mapping[str, Array],
        grads: Mapping[str, Array],
        tape: list[Any],
        dy: Array,
        on_ready: Callable[[str], None],
    ) -> None:
        # Below the first layer with parameters nobody needs a gradient.
        lowest = next(i for i, names in enumerate(self._names) if names)
        layers = list(self.layers.values())
        for i in range(len(layers) - 1, lowest - 1, -1):
            p, g = self._own(i, params), self._own(i, grads)
            dy = layers[i].backward(p, g, tape.pop(), dy, i > lowest)
            for name in reversed(self._names[i].values()):
                on_ready(name)

    def _own(self, i: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {word: arrays[name] for word, name in self._names[i].items()}

    def _samples(self, params: Mapping[str, Array], x: Array) -> Array:
        if tuple(x.shape[1:]) != self.input_shape:
            raise UsageError(
                f"the model expects samples of shape {self.input_shape}, "
                f"seen {tuple(x.shape[1:])}; give the data that shape or build the model for it"
            )
        one = params[next(iter(self.parameters))]
        return namespace(one).asarray(x, dtype=one.dtype)


def initial_values(parameters: Mapping[str, Parameter], seed: int) -> dict[str, np.ndarray]:
    """Return the float64 start of each parameter: a function of `seed` and the parameters alone.

    Each has a random stream of its own, so that a change of one shape moves no other value.
    """
    return {
        name: one.init(np.random.Generator(np.random.Philox(key=_words(seed, i))), one.shape)
        for i, (name, one) in enumerate(parameters.items())
    }


def _words(seed: int, index: int) -> np.ndarray:
    return np.array([seed, index], dtype=np.uint64)


def _shapes(layers: Mapping[str, Layer], shape: Shape) -> list[Shape]:
    """Return the shape of a sample before each layer and after the last."""
    shapes, before = [shape], "the input"
    for name, layer in layers.items():
        this = f"'{name}' ({type(layer).__name__})"
        try:
            shapes.append(layer.output_shape(shapes[-1]))
        except UsageError as error:
            raise UsageError(f"layer {this} cannot follow {before}: {error}") from None
        before = this
    return shapes
