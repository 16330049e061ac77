"""The dense layer: one matrix product forward, two backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array
from hpctrain.nn.layer import (
    Key,
    Later,
    Parameter,
    Shape,
    he_normal,
    normal,
    require_at_least,
    rows_of,
    run_now,
    write_affine_gradients,
    zeros,
)


@dataclass(frozen=True)
class Linear:
    """y = x W + b: (n, inputs) -> (n, outputs); `weight` is (inputs, outputs), `bias` (outputs,).

    `inputs` is the size of the previous layer's output. With `per_position`, samples are (length,
    inputs), and the layer is applied to the vector of each position. `init_std` is the initial
    standard deviation of the weights; None follows He et al. (2015). Raises UsageError if samples
    are not vectors.
    """

    outputs: int
    per_position: bool = False
    init_std: float | None = None

    def __post_init__(self) -> None:
        require_at_least(self, outputs=(self.outputs, 1))

    def output_shape(self, shape: Shape) -> Shape:
        if self.per_position and len(shape) != 2:
            raise UsageError(f"expected vectors at positions (length, features), seen {shape}")
        if not self.per_position and len(shape) != 1:
            raise UsageError(f"expected vectors (features,), seen {shape}; put a Flatten before")
        return (*shape[:-1], self.outputs)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        init = he_normal(shape[-1]) if self.init_std is None else normal(self.init_std)
        weight = Parameter((shape[-1], self.outputs), init)
        return {"weight": weight, "bias": Parameter((self.outputs,), zeros)}

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Array]:
        flat = rows_of(x)
        y = flat @ p["weight"]
        y += p["bias"]
        return y.reshape(*x.shape[:-1], self.outputs), flat

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: Array,
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        flat = rows_of(dy)
        later(partial(write_affine_gradients, g, saved, flat))
        return (flat @ p["weight"].T).reshape(*dy.shape[:-1], saved.shape[1]) if want_dx else None
