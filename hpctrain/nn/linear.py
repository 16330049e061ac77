"""The dense layer: three matrix products, everything else is small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.nn.layer import Key, Parameter, Shape, at_least, he_normal, sum_rows, zeros
from hpctrain.xp import Array, namespace


@dataclass(frozen=True)
class Linear:
    """y = x W + b: (n, inputs) -> (n, outputs); `weight` is (inputs, outputs), `bias` (outputs,).

    `inputs` follows from the layer before. Raises UsageError if samples are not vectors.
    """

    outputs: int

    def __post_init__(self) -> None:
        at_least(self, outputs=(self.outputs, 1))

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 1:
            raise UsageError(f"expected vectors (features,), seen {shape}; put a Flatten before")
        return (self.outputs,)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        weight = Parameter((shape[0], self.outputs), he_normal(shape[0]))
        return {"weight": weight, "bias": Parameter((self.outputs,), zeros)}

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Array]:
        y = x @ p["weight"]
        y += p["bias"]
        return y, x

    def backward(
        self, p: Mapping[str, Array], g: Mapping[str, Array], saved: Array, dy: Array, want_dx: bool
    ) -> Array | None:
        # BLAS reads both transposes in place and writes straight into the slot of the gradient.
        namespace(dy).matmul(saved.T, dy, out=g["weight"])
        sum_rows(dy, out=g["bias"])
        return dy @ p["weight"].T if want_dx else None
