"""Models that a recipe can name: `[model] kind = "mlp"` and its options."""

from __future__ import annotations

import math
from typing import Annotated, Any

import pydantic

from hpctrain.config import options
from hpctrain.core.errors import UsageError
from hpctrain.nn.activations import ReLU
from hpctrain.nn.conv import Conv2d
from hpctrain.nn.dropout import Dropout
from hpctrain.nn.layer import Layer, Shape
from hpctrain.nn.linear import Linear
from hpctrain.nn.model import Model
from hpctrain.nn.pooling import MaxPool2d
from hpctrain.nn.reshape import AddChannel, Flatten
from hpctrain.nn.resnet import ResNetOptions
from hpctrain.nn.transformer import TransformerOptions

Count = Annotated[int, pydantic.Field(gt=0)]
Rate = Annotated[float, pydantic.Field(ge=0, lt=1)]


@options
class MlpOptions:
    """Dense layers with ReLU and dropout in between; `widths` runs from features to classes."""

    widths: Annotated[list[Count], pydantic.Field(min_length=2)]
    dropout: Rate = 0.0

    def build(self, input_shape: Shape | None, classes: int | None) -> Model:
        """Return the model for samples of `input_shape`, which it flattens, and `classes` labels.

        Without `input_shape` the model takes vectors of `widths[0]` features. Raises UsageError if
        `widths` does not fit the data.
        """
        shape = (self.widths[0],) if input_shape is None else tuple(input_shape)
        self._check_widths(shape, classes)
        layers: dict[str, Layer] = {
            "flatten": Flatten(),
            **_dense_layers(self.widths[1:], self.dropout),
        }
        return Model(layers, shape)

    def _check_widths(self, shape: Shape, classes: int | None) -> None:
        features = math.prod(shape)
        if features != self.widths[0]:
            raise UsageError(
                f"[model] widths: expected {features} first (samples have shape {shape}), "
                f"seen {self.widths[0]}; set widths = {[features, *self.widths[1:]]}"
            )
        if classes is not None and self.widths[-1] < classes:
            raise UsageError(
                f"[model] widths: expected at least {classes} last (the data has labels 0 .. "
                f"{classes - 1}), seen {self.widths[-1]}; "
                f"set widths = {[*self.widths[:-1], classes]}"
            )


@options
class CnnOptions:
    """Per entry of `channels` a 3x3 convolution, ReLU and 2x2 max pooling; then two dense layers.

    Images are channels last: (h, w) or (h, w, c).
    """

    channels: Annotated[list[Count], pydantic.Field(min_length=1)]
    hidden: Count
    dropout: Rate = 0.0

    def build(self, input_shape: Shape | None, classes: int | None) -> Model:
        """Return the model for images of `input_shape` and `classes` labels.

        Raises UsageError if either is None or the images are too small for the pooling.
        """
        if input_shape is None or classes is None:
            raise UsageError("[model] cnn: expected the shape of images and classes, seen none")
        shape = tuple(input_shape)
        if len(shape) not in (2, 3):
            raise UsageError(
                f"[model] cnn: expected images (h, w) or (h, w, channels), seen {shape}; "
                f"reshape the data, or use kind = 'mlp'"
            )
        return Model(self._layers(len(shape) == 2, classes), shape)

    def _layers(self, is_grey: bool, classes: int) -> dict[str, Layer]:
        layers: dict[str, Layer] = {"channel": AddChannel()} if is_grey else {}
        for i, outputs in enumerate(self.channels, 1):
            layers[f"conv{i}"] = Conv2d(outputs, kernel=3, padding=1)
            layers[f"conv{i}_relu"] = ReLU()
            layers[f"pool{i}"] = MaxPool2d()
        return layers | {"flatten": Flatten()} | _dense_layers([self.hidden, classes], self.dropout)


MODELS: dict[str, Any] = {
    "mlp": MlpOptions,
    "cnn": CnnOptions,
    "resnet20": ResNetOptions,
    "transformer": TransformerOptions,
}


def _dense_layers(widths: list[int], dropout: float) -> dict[str, Layer]:
    layers: dict[str, Layer] = {}
    for i, outputs in enumerate(widths, 1):
        layers[f"linear{i}"] = Linear(outputs)
        if i < len(widths):
            layers[f"linear{i}_relu"] = ReLU()
            layers[f"linear{i}_dropout"] = Dropout(dropout)
    return layers
