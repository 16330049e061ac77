"""A model: layers in a row and a loss; arrays in, gradients out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, like, namespace, narrowed, on_device, widened
from hpctrain.nn.chain import named, shapes
from hpctrain.nn.embedding import Embedding
from hpctrain.nn.layer import Key, Layer, Parameter, Shape
from hpctrain.nn.losses import Loss, Sums, add, arrived, cross_entropy

EVALUATION_TARGETS = 2048  #: at once in `evaluate`; bounds the memory whatever the test set
EVALUATION_ROWS = 256  #: samples at once, at most

__all__ = ["Key", "Model", "initial_values"]


class Model:
    """Layers in a row: a description without arrays, shared freely by ranks and threads.

    `layers` maps names to layers, first layer first; `input_shape` is that of one sample, without
    the batch. Raises UsageError if the output of a layer does not fit the next one.
    """

    def __init__(
        self, layers: Mapping[str, Layer], input_shape: Shape, loss: Loss = cross_entropy
    ) -> None:
        self.layers = dict(layers)
        self.input_shape = tuple(input_shape)
        self.loss = loss
        self._first = next(iter(self.layers.values()), None)
        sample_shapes = shapes(self.layers, self.input_shape)
        self.output_shape = sample_shapes[-1]
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, Parameter] = {}
        self._names: list[dict[str, str]] = []  # per layer: {its name: the model's name}
        for (name, layer), shape in zip(self.layers.items(), sample_shapes, strict=False):
            self._names.append(self._take(name, layer.parameters(shape)))
        if not self.parameters:
            raise UsageError("a model needs a layer with parameters, seen none")
        #: The parameter whose dtype is that of samples
        self._leading = next((n for n, p in self.parameters.items() if not p.wide),
                             next(iter(self.parameters)))  # fmt: skip
        self._uses = Counter(name for names in self._names for name in names.values())

    @property
    def targets(self) -> int:
        """The number of targets per sample, as `Sums` counts them: vectors of the output."""
        return prod(self.output_shape[:-1])

    def gradient(
        self,
        params: Mapping[str, Array],
        grads: Mapping[str, Array],
        x: Array,
        y: Array,
        scale: float,
        key: Key,
        on_ready: Callable[[str], None],
        more: bool = False,
    ) -> Sums:
        """Write the gradient of `scale` times the summed loss of a batch into `grads`.

        `params` holds an array per parameter and buffer, `grads` one per parameter, all of one
        dtype, float32 or float64; or float32 where they are `widened`, and 16 bits elsewhere.
        Buffers are written. `grads` must be contiguous and is overwritten, also by a batch of no
        samples (with zeros); with `more` it is added to.
        `x` is (n, *input_shape) in any real dtype, `y` the loss's targets, mostly (n,) integers;
        neither is written. `on_ready(name)` is called once per parameter, directly after its last
        write, the last layer's first; `key.on_need(name)` before a layer reads a parameter or
        buffer, and for all of them before backward begins. Raises UsageError if samples have
        another shape than `input_shape`.
        """
        x = self._samples(params, x)
        tape: list[Any] = []
        for i, layer in enumerate(self.layers.values()):
            if key.on_need is not None:
                for name in self._names[i].values():
                    key.on_need(name)
            x, saved = layer.forward(self._own(i, params), x, key._replace(layer=i))
            tape.append(saved)
        # On a device, the sums are copied asynchronously: backward does not wait for them.
        sums, dy = self.loss(widened(x), like(x, y, y.dtype), scale)
        self._backward(params, grads, tape, narrowed(dy, x), on_ready, more)
        return arrived(sums)

    def evaluate(self, params: Mapping[str, Array], x: Array, y: Array) -> Sums:
        """Return the sums of a data set; arrays as in `gradient`, without dropout."""
        sums = Sums(0.0, 0, 0)
        rows = max(1, min(EVALUATION_ROWS, EVALUATION_TARGETS // self.targets))
        for start in range(0, len(x), rows):
            piece = slice(start, start + rows)
            outputs = self.outputs(params, x[piece])
            piece_sums, _ = self.loss(widened(outputs), like(outputs, y[piece], y.dtype), None)
            sums = add(sums, arrived(piece_sums))
        return sums

    def outputs(self, params: Mapping[str, Array], x: Array) -> Array:
        """Return the outputs of the last layer for `x`, (n, *output_shape), without dropout."""
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
        accumulate: bool,
    ) -> None:
        # Below the first layer with parameters no gradient is needed.
        lowest = next(i for i, names in enumerate(self._names) if names)
        layers, uses = list(self.layers.values()), Counter(self._uses)
        written = set(self.parameters) if accumulate else set()
        for i in range(len(layers) - 1, lowest - 1, -1):
            names = {w: name for w, name in self._names[i].items() if name in self.parameters}
            # Layers write; a second contribution is written aside and added.
            added = {w: _like(grads[name]) for w, name in names.items() if name in written}
            g = {w: grads[name] for w, name in names.items()} | added
            dy = layers[i].backward(self._own(i, params), g, tape.pop(), dy, i > lowest)
            for w, name in reversed(names.items()):
                if w in added:
                    grads[name][...] += added[w]
                written.add(name)
                uses[name] -= 1
                if not uses[name]:
                    on_ready(name)

    def _take(self, layer: str, own: Mapping[str, Parameter]) -> dict[str, str]:
        """Add the parameters and buffers of a layer; return {its name: the model's name}."""
        names = {}
        for name, parameter in named(layer, own).items():
            target = parameter.same_as or name
            names[name.removeprefix(f"{layer}.")] = target
            if parameter.same_as:
                self._must_be(layer, target, parameter)
            else:
                (self.parameters if parameter.trained else self.buffers)[name] = parameter
        return names

    def _must_be(self, layer: str, name: str, parameter: Parameter) -> None:
        earlier = self.parameters[name].shape if name in self.parameters else "none before it"
        if earlier != parameter.shape:
            raise UsageError(
                f"layer '{layer}' shares '{name}': expected {parameter.shape}, seen {earlier}"
            )

    def _own(self, i: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {word: arrays[name] for word, name in self._names[i].items()}

    def _samples(self, params: Mapping[str, Array], x: Array) -> Array:
        if tuple(x.shape[1:]) != self.input_shape:
            raise UsageError(
                f"the model expects samples of shape {self.input_shape}, "
                f"seen {tuple(x.shape[1:])}; give the data that shape or build the model for it"
            )
        leading = params[self._leading]
        if isinstance(self._first, Embedding):  # integers, which 16-bit floats may not represent
            if on_device(leading) and not on_device(x):
                self._first.check(x)
            return like(leading, x, x.dtype)
        return like(leading, x)


def initial_values(parameters: Mapping[str, Parameter], seed: int) -> dict[str, np.ndarray]:
    """Return the float64 start of each parameter: a function of `seed` and the parameters alone.

    Each has a random stream of its own, so that a change of one shape moves no other value.
    """
    return {
        name: parameter.init(
            np.random.Generator(np.random.Philox(key=_words(seed, i))), parameter.shape
        )
        for i, (name, parameter) in enumerate(parameters.items())
    }


def _words(seed: int, index: int) -> np.ndarray:
    return np.array([seed, index], dtype=np.uint64)


def _like(x: Array) -> Array:
    return namespace(x).empty_like(x)
