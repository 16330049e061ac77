"""Multi-layer perceptrons: `[model] kind = "mlp"`."""

from __future__ import annotations

import math
from typing import Annotated

import pydantic

from hpctrain.core.config import options
from hpctrain.core.errors import UsageError
from hpctrain.nn.activations import ReLU
from hpctrain.nn.dropout import Dropout
from hpctrain.nn.layer import Layer, Shape
from hpctrain.nn.linear import Linear
from hpctrain.nn.model import Model
from hpctrain.nn.reshape import Flatten

Count = Annotated[int, pydantic.Field(gt=0)]
Rate = Annotated[float, pydantic.Field(ge=0, lt=1)]


@options
class MlpOptions:
    """Dense layers with ReLU and dropout in between; `widths` runs from features to outputs."""

    widths: Annotated[list[Count], pydantic.Field(min_length=2)]
    dropout: Rate = 0.0

    def build(self, input_shape: Shape | None, outputs: int | None) -> Model:
        """Return the model for samples of `input_shape`, which it flattens.

        `outputs` are the classes of the data, or the features of its targets. Without `input_shape`
        the model takes vectors of `widths[0]` features. Raises UsageError if `widths` does not fit.
        """
        shape = (self.widths[0],) if input_shape is None else tuple(input_shape)
        features = math.prod(shape)
        if features != self.widths[0]:
            raise UsageError(
                f"[model] widths: expected {features} first (samples have shape {shape}), "
                f"seen {self.widths[0]}; set widths = {[features, *self.widths[1:]]}"
            )
        if outputs is not None and self.widths[-1] < outputs:
            raise UsageError(
                f"[model] widths: expected at least {outputs} last (the classes of the data, or "
                f"the features of its targets), seen {self.widths[-1]}; "
                f"set widths = {[*self.widths[:-1], outputs]}"
            )
        layers: dict[str, Layer] = {
            "flatten": Flatten(),
            **dense_layers(self.widths[1:], self.dropout),
        }
        return Model(layers, shape)


def dense_layers(widths: list[int], dropout: float) -> dict[str, Layer]:
    """Return linear layers of `widths` outputs with ReLU and dropout in between."""
    layers: dict[str, Layer] = {}
    for i, outputs in enumerate(widths, 1):
        layers[f"linear{i}"] = Linear(outputs)
        if i < len(widths):
            layers[f"linear{i}_relu"] = ReLU()
            layers[f"linear{i}_dropout"] = Dropout(dropout)
    return layers
