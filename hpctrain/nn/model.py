"""A model: a sequence of layers and a loss, with the gradient of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.trees import map_arrays, sample_count, sample_shape
from hpctrain.core.xp import Array, like, narrowed, on_device, to_host, widened
from hpctrain.nn.chain import Concatenate, infer_shapes, qualify_names
from hpctrain.nn.embedding import Embedding
from hpctrain.nn.layer import Key, Layer, Parameter, Shape
from hpctrain.nn.losses import (
    Loss,
    PendingSums,
    Sums,
    add,
    as_loss,
    cross_entropy,
    wait_for_sums,
)
from hpctrain.nn.metrics.metric import Observer, zero_example
from hpctrain.nn.part import GradientSums, Part

MAX_EVALUATION_TARGETS = 2048  #: targets that `evaluate` computes at once; bounds the memory
MAX_EVALUATION_ROWS = 256  #: samples that `evaluate` computes at once

__all__ = ["Key", "Model"]


class Model:
    """A sequence of layers: a description without arrays, which ranks and threads may share.

    `layers` maps names to layers, first layer first; the layers of a sequence are named by their
    class and number, such as "linear1". `input_shape` is a sample's shape; a number stands for a
    vector. For samples that are dicts or tuples of arrays it is the dict or tuple of shapes. `loss`
    is a name, such as "mean_squared_error", or an `ht.nn.Loss`. Raises UsageError if the output of
    a layer does not fit the next one.
    """

    def __init__(
        self,
        layers: Mapping[str, Layer] | Sequence[Layer],
        input_shape: Any = None,
        loss: Loss | str = cross_entropy,
    ) -> None:
        self.layers = _name_layers(layers)
        self.input_shape = _as_shape(input_shape)
        self.loss = as_loss(loss)
        self._first_layer = next(iter(self.layers.values()), None)
        #: The shape of a sample before each layer and after the last
        self.shapes = infer_shapes(self.layers, self.input_shape)
        self.output_shape = self.shapes[-1]
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, Parameter] = {}
        #: Of each layer its own names of parameters and buffers, and their full names
        self.layer_names: list[dict[str, str]] = []
        #: The layers that use each parameter or buffer, ascending: the first one declares it
        self.uses: dict[str, list[int]] = {}
        layer_shapes = zip(self.layers.items(), self.shapes, strict=False)
        for i, ((name, layer), shape) in enumerate(layer_shapes):
            self.layer_names.append(self._register_parameters(name, layer.parameters(shape)))
            for full_name in self.layer_names[i].values():
                self.uses.setdefault(full_name, []).append(i)
        if not self.parameters:
            raise UsageError("a model needs a layer with parameters, seen none")
        #: The parameter whose dtype the samples take
        self._dtype_parameter = next((n for n, p in self.parameters.items() if not p.wide),
                             next(iter(self.parameters)))  # fmt: skip
        #: All layers; Part(self, start, stop) selects a range
        self.whole = Part(self, 0, len(self.layers))

    def __repr__(self) -> str:
        shapes = f"{self.input_shape} -> {self.output_shape}"
        return f"Model({', '.join(self.layers)}: {shapes}, {self.parameter_count:,} parameters)"

    def summary(self) -> str:
        """Return a table with each layer's output shape and parameters."""
        rows = [("layer", "output shape", "parameters")]
        rows += [
            (f"{name} ({type(layer).__name__})", str(shape), f"{self._count_elements(own_names):,}")
            for (name, layer), shape, own_names in zip(
                self.layers.items(),
                self.shapes[1:],
                map(dict.values, self.layer_names),
                strict=True,
            )
        ]
        rows.append(("total", "", f"{self.parameter_count:,}"))
        first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{a:{first}}  {b:{second}}  {c:>{third}}" for a, b, c in rows)

    @property
    def parameter_count(self) -> int:
        """The number of trained numbers."""
        return self._count_elements(self.parameters)

    def _count_elements(self, names: Iterable[str]) -> int:
        return sum(prod(self.parameters[n].shape) for n in names if n in self.parameters)

    @property
    def targets(self) -> int:
        """The number of targets per sample, as `Sums` counts them: one per output vector."""
        return prod(self.output_shape[:-1])

    def gradient(
        self,
        params: Mapping[str, Array],
        grads: Mapping[str, Array],
        x: Any,
        y: Any,
        scale: float,
        key: Key,
        on_ready: Callable[[str], None],
    ) -> Sums:
        """Write the gradient of `scale` times the summed loss of a batch into `grads`.

        `params` holds an array per parameter and buffer, `grads` one per parameter. All have one
        dtype, float32 or float64; or `wide` ones have float32, and the others 16 bits. Buffers are
        written. `grads` must be contiguous; it is overwritten, with zeros by a batch without
        samples.

        `x` is (n, *input_shape) in any real dtype, or a tree of such arrays; `y` holds the targets
        of the loss, mostly (n,) integers; neither is written. `on_ready(name)` is called once per
        parameter, directly after the last write of its gradient; parameters of the last layer
        come first. Raises UsageError if samples have another shape than `input_shape`.
        """
        return self.add_gradient(
            params, GradientSums(self.whole, grads, 1, on_ready), x, y, scale, key
        )

    def add_gradient(
        self,
        params: Mapping[str, Array],
        grads: GradientSums,
        x: Any,
        y: Any,
        scale: float,
        key: Key,
    ) -> Sums:
        """Add the gradient of the next micro-batch to `grads`; for the arguments see `gradient`."""
        x = self.prepare_samples(x, params[self._dtype_parameter])
        output, tape = self.whole.forward(params, x, key)
        # On a device the sums are copied asynchronously, so that backward does not wait for them.
        sums, dy = self.loss_gradient(output, y, scale)
        self.whole.backward(params, grads, tape, dy)
        return wait_for_sums(sums)

    def loss_gradient(
        self, output: Array, y: Any, scale: float
    ) -> tuple[Sums | PendingSums, Array]:
        """Return the sums of the loss of the last layer's `output`, and `scale` times dL/doutput.

        `wait_for_sums` returns the sums on the host.
        """
        sums, dy = self.loss(widened(output), _in_memory_of(output, y), scale)
        assert dy is not None
        return sums, narrowed(dy, output)

    def evaluate(
        self, params: Mapping[str, Array], x: Any, y: Any, observe: Observer | None = None
    ) -> Sums:
        """Return the sums over a data set, without dropout; for the arrays see `gradient`.

        `observe(outputs, targets)` is called with all outputs in turn, a few at a time.
        """
        metric_sums: Sums = {}
        for piece in self.evaluation_pieces(sample_count(x)):
            samples, targets = (map_arrays(itemgetter(piece), tree) for tree in (x, y))
            outputs = self.outputs(params, samples)
            metric_sums = add(metric_sums, wait_for_sums(self.loss_sums(outputs, targets)))
            if observe is not None:
                observe(to_host(widened(outputs)), targets)
        return metric_sums

    def evaluation_pieces(self, samples: int) -> list[slice]:
        """Return the samples that `evaluate` computes at once, in turn: it bounds the memory."""
        rows = max(1, min(MAX_EVALUATION_ROWS, MAX_EVALUATION_TARGETS // self.targets))
        return [slice(i, min(i + rows, samples)) for i in range(0, samples, rows)]

    def loss_sums(self, output: Array, y: Any) -> Sums | PendingSums:
        """Return the sums of the loss of the last layer's `output`."""
        sums, _ = self.loss(widened(output), _in_memory_of(output, y))
        return sums

    @property
    def normalizes_batch(self) -> bool:
        """Whether a layer uses statistics of the whole batch: those have buffers."""
        return bool(self.buffers)

    def output_shape_for(self, samples: Any) -> Shape:
        """Return the output's shape for one of `samples`; raise UsageError if they do not fit."""
        self.check_shape(samples.sample_shape)
        return self.output_shape

    metric_example = zero_example  #: outputs and targets as metrics get them

    def check_shape(self, shape: Any) -> None:
        """Raise UsageError unless samples of `shape` fit."""
        if shape != self.input_shape:
            raise UsageError(
                f"the model expects samples of shape {self.input_shape}, "
                f"seen {shape}; give the data that shape or build the model for it"
            )

    def outputs(self, params: Mapping[str, Array], x: Any) -> Array:
        """Return the outputs of the last layer for `x`, (n, *output_shape), without dropout."""
        x = self.prepare_samples(x, params[self._dtype_parameter])
        return self.whole.forward(params, x, None)[0]

    def prepare_samples(self, x: Any, parameters: Array) -> Any:
        """Return samples for the first layer, in the memory and the dtype of `parameters`.

        Raises UsageError if samples have another shape than `input_shape`.
        """
        self.check_shape(sample_shape(x))
        return _convert_samples(x, self._first_layer, parameters)

    def _register_parameters(
        self, layer: str, parameters: Mapping[str, Parameter]
    ) -> dict[str, str]:
        """Add the parameters and buffers of a layer; return {name in the layer: full name}."""
        names = {}
        for name, parameter in qualify_names(layer, parameters).items():
            full_name = parameter.shared_with or name
            names[name.removeprefix(f"{layer}.")] = full_name
            if parameter.shared_with:
                owner = self.parameters.get(full_name)
                shared_shape = owner.shape if owner else "none before it"
                if shared_shape != parameter.shape:
                    raise UsageError(
                        f"layer '{layer}' shares '{full_name}': expected {parameter.shape}, "
                        f"seen {shared_shape}"
                    )
            else:
                (self.parameters if parameter.trainable else self.buffers)[name] = parameter
        return names


def _convert_samples(x: Any, layer: Layer | None, parameter: Array) -> Any:
    """Return samples for `layer`, in the memory and the dtype of `parameter`; indices keep theirs.

    16-bit floats may not represent the indices of an Embedding.
    """
    if isinstance(layer, Concatenate):
        return {
            name: _convert_samples(x[name], next(iter(layers.values()), None), parameter)
            for name, layers in layer.branches.items()
        }
    if isinstance(layer, Embedding):
        if on_device(parameter) and not on_device(x):
            layer.check(x)
        return like(parameter, x, x.dtype)
    return map_arrays(partial(like, parameter), x)


def _in_memory_of(x: Array, y: Any) -> Any:
    """Return the targets `y` in the memory of `x`."""
    return map_arrays(lambda array: like(x, array, array.dtype), y)


def _name_layers(layers: Mapping[str, Layer] | Sequence[Layer]) -> dict[str, Layer]:
    """Return the layers by name; a sequence names them by class and number, such as "linear1"."""
    if not isinstance(layers, (Mapping, list, tuple)):
        raise UsageError(
            f"layers: expected a list of layers, or a dict of layers by name, seen {layers!r}"
        )
    layer_list = list(layers.values() if isinstance(layers, Mapping) else layers)
    for layer in layer_list:
        if isinstance(layer, type) or not hasattr(layer, "output_shape"):
            raise UsageError(f"layers: expected layers such as ht.nn.Linear(10), seen {layer!r}")
    if isinstance(layers, Mapping):
        return dict(layers)
    kinds = [type(layer).__name__.lower() for layer in layer_list]
    layer_numbers = [kinds[: i + 1].count(kind) for i, kind in enumerate(kinds)]
    return {
        f"{kind}{n}": layer for kind, n, layer in zip(kinds, layer_numbers, layer_list, strict=True)
    }


def _as_shape(input_shape: Any) -> Any:
    """Return a sample's shape as a tuple, or a tree of such."""
    if isinstance(input_shape, Mapping):
        return {name: _as_shape(shape) for name, shape in input_shape.items()}
    shape = (input_shape,) if isinstance(input_shape, (int, np.integer)) else input_shape
    if isinstance(shape, tuple) and any(isinstance(n, (Mapping, tuple)) for n in shape):
        return tuple(map(_as_shape, shape))
    if not isinstance(shape, (tuple, list)) or not all(
        isinstance(n, (int, np.integer)) and n > 0 for n in shape
    ):
        raise UsageError(
            f"input_shape: expected the shape of one sample, such as (28, 28), seen {input_shape!r}"
        )
    return tuple(int(n) for n in shape)
