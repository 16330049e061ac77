"""Layers that contain layers: a chain, a residual connection, recomputation, branches.

    Chain       x -> a -> b -> c -> y
    Residual    x -> body -> (+) -> y       He et al. (2016), "Deep residual learning"
                 `-- shortcut --^
    Recompute   saves only x; backward runs the inner layer forward once more (Chen et al., 2016,
                "Training deep nets with sublinear memory cost")
    Concatenate a branch of layers for each array of a sample, then one vector:
                {"image": x, "age": a}     image -> flatten -> linear -.
                                                                       +--> (..., features)
                                           age ------------------------'

A parameter of an inner layer is named by its path: "conv1.weight".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.layer import Key, Later, Layer, LazyArrays, Parameter, Shape, run_now, takes_later

#: More layers than a chain has: keeps the random streams of nested layers apart.
MAX_CHAIN_LAYERS = 1 << 16
MAX_BRANCHES = 1 << 10  #: more branches than a model has: keeps their random streams apart


def infer_shapes(layers: Mapping[str, Layer], shape: Shape) -> list[Shape]:
    """Return the shape of a sample before each layer and after the last.

    Raises UsageError, with the names of both layers, if one does not fit the previous one.
    """
    result, previous = [shape], "the input"
    for name, layer in layers.items():
        label = f"'{name}' ({type(layer).__name__})"
        try:
            result.append(layer.output_shape(result[-1]))
        except UsageError as error:
            raise UsageError(f"layer {label} cannot follow {previous}: {error}") from None
        previous = label
    return result


def qualify_names(name: str, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters of layer `name` under their paths, `name.parameter`."""
    return {f"{name}.{own_name}": parameter for own_name, parameter in parameters.items()}


def select_layer(arrays: Mapping[str, Array], name: str) -> Mapping[str, Array]:
    """Return the arrays of inner layer `name`, under the names that the layer itself uses."""
    prefix = f"{name}."
    if type(arrays) is LazyArrays:
        return arrays.select(prefix)
    return {path[len(prefix) :]: x for path, x in arrays.items() if path.startswith(prefix)}


@dataclass(frozen=True)
class Chain:
    """Layers one after the other, as one layer."""

    layers: Mapping[str, Layer]

    def output_shape(self, shape: Shape) -> Shape:
        return infer_shapes(self.layers, shape)[-1]

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        inner_shapes = infer_shapes(self.layers, shape)
        return {
            full_name: parameter
            for (name, layer), inner in zip(self.layers.items(), inner_shapes, strict=False)
            for full_name, parameter in qualify_names(name, layer.parameters(inner)).items()
        }

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, list[tuple[Layer, str, Any]]]:
        tape = []
        for i, (name, layer) in enumerate(self.layers.items()):
            inner_key = key and key._replace(layer=(key.layer + 1) * MAX_CHAIN_LAYERS + i)
            x, saved = layer.forward(select_layer(p, name), x, inner_key)
            tape.append((layer, name, saved))
        return x, tape

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: list[tuple[Layer, str, Any]],
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        tape = list(saved)
        while tape:
            layer, name, inner_saved = tape.pop()
            # Layers before the first one with parameters need no gradient.
            needs_dx = want_dx or any(select_layer(p, earlier) for _, earlier, _ in tape)
            layer_arrays = select_layer(p, name), select_layer(g, name), inner_saved
            extra = (later,) if takes_later(type(layer)) else ()
            dx = layer.backward(*layer_arrays, dy, needs_dx, *extra)
            if not needs_dx:
                return dx
            dy = dx
        return dy


@dataclass(frozen=True)
class Residual:
    """y = body(x) + shortcut(x); a shortcut without layers is the identity.

    Raises UsageError if the two branches have outputs of different shapes.
    """

    body: Mapping[str, Layer]
    shortcut: Mapping[str, Layer] = field(default_factory=dict)

    def _branches(self) -> tuple[Chain, Chain]:
        return Chain(self.body), Chain(self.shortcut)

    def output_shape(self, shape: Shape) -> Shape:
        body, shortcut = (branch.output_shape(shape) for branch in self._branches())
        if body != shortcut:
            raise UsageError(
                f"the body ends in {body} but the shortcut in {shortcut}; expected alike"
            )
        return body

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        body, shortcut = (branch.parameters(shape) for branch in self._branches())
        return qualify_names("shortcut", shortcut) | body

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Any]:
        body, shortcut = self._branches()
        y, body_saved = body.forward(p, x, key)
        inner_key = key and key._replace(layer=(key.layer + 1) * MAX_CHAIN_LAYERS - 1)
        shortcut_y, shortcut_saved = shortcut.forward(select_layer(p, "shortcut"), x, inner_key)
        return y + shortcut_y, (body_saved, shortcut_saved)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: Any,
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        body, shortcut = self._branches()
        dx = body.backward(p, g, saved[0], dy, want_dx, later)
        shortcut_dx = shortcut.backward(
            select_layer(p, "shortcut"), select_layer(g, "shortcut"), saved[1], dy, want_dx, later
        )
        return dx + shortcut_dx if want_dx else None  # type: ignore[operator]


@dataclass(frozen=True)
class Recompute:
    """`inner` with less memory and a second forward pass; the result is the same bit for bit."""

    inner: Layer

    def output_shape(self, shape: Shape) -> Shape:
        return self.inner.output_shape(shape)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return self.inner.parameters(shape)

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, tuple[Array, Key | None]]:
        return self.inner.forward(p, x, key)[0], (x, key and key._replace(recomputed=True))

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: tuple[Array, Key | None],
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        _, inner_saved = self.inner.forward(p, *saved)
        extra = (later,) if takes_later(type(self.inner)) else ()
        return self.inner.backward(p, g, inner_saved, dy, want_dx, *extra)


@dataclass(frozen=True)
class Concatenate:
    """The outputs of `branches`, concatenated along the last axis; a first layer.

    Samples are dicts of arrays with the names of the branches; a branch without layers is the
    array itself. Raises UsageError if outputs differ in other axes than the last.
    """

    branches: Mapping[str, Mapping[str, Layer]]

    def output_shape(self, shape: Any) -> Shape:
        self._check_names(shape)
        shapes = {name: Chain(layers).output_shape(shape[name])
                  for name, layers in self.branches.items()}  # fmt: skip
        if len({branch_shape[:-1] for branch_shape in shapes.values()}) > 1:
            raise UsageError(f"expected branches with outputs alike but for the last axis, "
                             f"seen {shapes}")  # fmt: skip
        return (
            *next(iter(shapes.values()))[:-1],
            sum(branch_shape[-1] for branch_shape in shapes.values()),
        )

    def parameters(self, shape: Any) -> dict[str, Parameter]:
        self._check_names(shape)
        return {
            full_name: parameter
            for name, layers in self.branches.items()
            for full_name, parameter in qualify_names(
                name, Chain(layers).parameters(shape[name])
            ).items()
        }

    def forward(
        self, p: Mapping[str, Array], x: Any, key: Key | None
    ) -> tuple[Array, tuple[list[Any], list[int]]]:
        outputs, saved = [], []
        for i, (name, layers) in enumerate(self.branches.items()):
            inner_key = key and key._replace(layer=(key.layer + 1) * MAX_BRANCHES + i)
            y, branch_saved = Chain(layers).forward(select_layer(p, name), x[name], inner_key)
            outputs.append(y)
            saved.append(branch_saved)
        ends = list(accumulate(y.shape[-1] for y in outputs))
        return namespace(outputs[0]).concatenate(outputs, axis=-1), (saved, ends)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: Any,
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> None:
        branch_saved, ends = saved
        xp = namespace(dy)
        parts = xp.split(dy, ends[:-1], axis=-1)
        branches = list(zip(self.branches.items(), branch_saved, parts, strict=True))
        # The last branch first: parameters are then written in reverse order, as in a model.
        for (name, layers), own_saved, branch_dy in reversed(branches):
            own_p, own_g = select_layer(p, name), select_layer(g, name)
            branch_dy = xp.ascontiguousarray(branch_dy)
            Chain(layers).backward(own_p, own_g, own_saved, branch_dy, want_dx=False, later=later)

    def _check_names(self, shape: Any) -> None:
        if not isinstance(shape, dict) or shape.keys() != self.branches.keys():
            names_text = ", ".join(self.branches)
            seen_text = ", ".join(shape) if isinstance(shape, dict) else f"one of shape {shape}"
            raise UsageError(f"expected a dict of arrays {names_text} per sample, seen {seen_text}")
