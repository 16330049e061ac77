"""Convolutional networks: `[model] kind = "cnn"`."""

from __future__ import annotations

from typing import Annotated

import pydantic

from hpctrain.core.config import options
from hpctrain.core.errors import UsageError
from hpctrain.nn.activations import ReLU
from hpctrain.nn.conv import Conv2d, MaxPool2d
from hpctrain.nn.layer import Layer, Shape
from hpctrain.nn.mlp import Count, Rate, dense_layers
from hpctrain.nn.model import Model
from hpctrain.nn.reshape import AddChannel, Flatten


@options
class CnnOptions:
    """Per entry of `channels` a 3x3 convolution, ReLU and 2x2 max pooling; then two dense layers.

    Images are channels last: (h, w) or (h, w, c).
    """

    channels: Annotated[list[Count], pydantic.Field(min_length=1)]
    hidden: Count
    dropout: Rate = 0.0

    def build(self, input_shape: Shape | None, outputs: int | None) -> Model:
        """Return the model for images of `input_shape`, with `outputs` classes or features.

        Raises UsageError if either is None or the images are too small for the pooling.
        """
        if input_shape is None or outputs is None:
            raise UsageError(
                "[model] cnn: expected the shape of images and the number of outputs, seen none"
            )
        shape = tuple(input_shape)
        if len(shape) not in (2, 3):
            raise UsageError(
                f"[model] cnn: expected images (h, w) or (h, w, channels), seen {shape}; "
                f"reshape the data, or use kind = 'mlp'"
            )
        return Model(self._layers(len(shape) == 2, outputs), shape)

    def _layers(self, is_grey: bool, outputs: int) -> dict[str, Layer]:
        layers: dict[str, Layer] = {"channel": AddChannel()} if is_grey else {}
        for i, channels in enumerate(self.channels, 1):
            layers[f"conv{i}"] = Conv2d(channels, kernel=3, padding=1)
            layers[f"conv{i}_relu"] = ReLU()
            layers[f"pool{i}"] = MaxPool2d()
        return layers | {"flatten": Flatten()} | dense_layers([self.hidden, outputs], self.dropout)
