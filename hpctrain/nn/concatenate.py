"""Models with several inputs: a branch of layers for each array of a sample, then one vector.

{"image": x, "age": a}     image -> flatten -> linear -.
                                                       +--> concatenated (..., features)
                           age -----------------------'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.chain import Chain, qualify_names, select_layer
from hpctrain.nn.layer import Key, Later, Layer, Parameter, Shape, run_now

MAX_BRANCHES = 1 << 10  #: more branches than a model has: keeps their random streams apart


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
        if len({own[:-1] for own in shapes.values()}) > 1:
            raise UsageError(f"expected branches with outputs alike but for the last axis, "
                             f"seen {shapes}")  # fmt: skip
        return (*next(iter(shapes.values()))[:-1], sum(own[-1] for own in shapes.values()))

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
            names = ", ".join(self.branches)
            actual = ", ".join(shape) if isinstance(shape, dict) else f"one of shape {shape}"
            raise UsageError(f"expected a dict of arrays {names} per sample, seen {actual}")
