"""Layers made of layers: in a row, with a shortcut, or recomputed to save memory.

    Chain       x -> a -> b -> c -> y
    Residual    x -> body -> (+) -> y       He et al. (2016), "Deep residual learning"
                 `-- shortcut --^
    Recompute   keeps x alone; backward runs the inner layer forward once more (Chen et al., 2016,
                "Training deep nets with sublinear memory cost")

The parameters of inner layers carry the path to them: "conv1.weight".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array
from hpctrain.nn.layer import Key, Layer, Parameter, Shape

LAYERS = 1 << 16  #: more than a chain has: separates the random numbers of nested layers


def shapes(layers: Mapping[str, Layer], shape: Shape) -> list[Shape]:
    """Return the shape of a sample before each layer and after the last.

    Raises UsageError, with the names of both layers, if one does not fit the previous one.
    """
    result, before = [shape], "the input"
    for name, layer in layers.items():
        this = f"'{name}' ({type(layer).__name__})"
        try:
            result.append(layer.output_shape(result[-1]))
        except UsageError as error:
            raise UsageError(f"layer {this} cannot follow {before}: {error}") from None
        before = this
    return result


def named(name: str, own: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters of layer `name` by their paths, `name.parameter`."""
    return {f"{name}.{word}": parameter for word, parameter in own.items()}


def within(arrays: Mapping[str, Array], name: str) -> dict[str, Array]:
    """Return the arrays of the inner layer `name` by its own names."""
    start = f"{name}."
    return {path[len(start) :]: x for path, x in arrays.items() if path.startswith(start)}


@dataclass(frozen=True)
class Chain:
    """Layers one after the other, as one layer."""

    layers: Mapping[str, Layer]

    def output_shape(self, shape: Shape) -> Shape:
        return shapes(self.layers, shape)[-1]

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        result: dict[str, Parameter] = {}
        for (name, layer), inner_shape in zip(
            self.layers.items(), shapes(self.layers, shape), strict=False
        ):
            result |= named(name, layer.parameters(inner_shape))
        return result

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, list[tuple[Layer, str, Any]]]:
        tape = []
        for i, (name, layer) in enumerate(self.layers.items()):
            inner = key and key._replace(layer=(key.layer + 1) * LAYERS + i)
            x, saved = layer.forward(within(p, name), x, inner)
            tape.append((layer, name, saved))
        return x, tape

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: list[tuple[Layer, str, Any]],
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        tape = list(saved)
        while tape:
            layer, name, inner_saved = tape.pop()
            inner = layer.backward(
                within(p, name), within(g, name), inner_saved, dy, want_dx or bool(tape)
            )
            dy = inner
        return dy


@dataclass(frozen=True)
class Residual:
    """y = body(x) + shortcut(x); without layers, the shortcut is x itself.

    Raises UsageError if the two branches have outputs of different shapes.
    """

    body: Mapping[str, Layer]
    shortcut: Mapping[str, Layer] = field(default_factory=dict)

    def _ways(self) -> tuple[Chain, Chain]:
        return Chain(self.body), Chain(self.shortcut)

    def output_shape(self, shape: Shape) -> Shape:
        body, shortcut = (way.output_shape(shape) for way in self._ways())
        if body != shortcut:
            raise UsageError(
                f"the body ends in {body} but the shortcut in {shortcut}; expected alike"
            )
        return body

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        body, shortcut = (way.parameters(shape) for way in self._ways())
        return named("shortcut", shortcut) | body

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Any]:
        body, shortcut = self._ways()
        y, body_saved = body.forward(p, x, key)
        inner = key and key._replace(layer=(key.layer + 1) * LAYERS - 1)
        z, shortcut_saved = shortcut.forward(within(p, "shortcut"), x, inner)
        return y + z, (body_saved, shortcut_saved)

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Any, dy: Array, want_dx: bool
    ) -> Array | None:
        body, shortcut = self._ways()
        dx = body.backward(p, g, saved[0], dy, want_dx)
        across = shortcut.backward(
            within(p, "shortcut"), within(g, "shortcut"), saved[1], dy, want_dx
        )
        return dx + across if want_dx else None  # type: ignore[operator]


@dataclass(frozen=True)
class Recompute:
    """`inner` with the same result, bit for bit, less memory and a second forward pass."""

    inner: Layer

    def output_shape(self, shape: Shape) -> Shape:
        return self.inner.output_shape(shape)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return self.inner.parameters(shape)

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, tuple[Array, Key | None]]:
        return self.inner.forward(p, x, key)[0], (x, key and key._replace(again=True))

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: tuple[Array, Key | None],
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        _, inner = self.inner.forward(p, *saved)
        return self.inner.backward(p, g, inner, dy, want_dx)
