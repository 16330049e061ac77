"""ResNet for small images (He et al., 2015, "Deep residual learning", section 4.2).

    conv 16 - [block 16] x n - [block 32] x n - [block 64] x n - mean of each channel - linear

The first block of a group halves the image. Two convolutions per block and the two ends make
6n + 2 layers: n = 3 is ResNet-20.
"""

from __future__ import annotations

from typing import Annotated

import pydantic

from hpctrain.core.config import options
from hpctrain.core.errors import UsageError
from hpctrain.nn.activations import ReLU
from hpctrain.nn.batch_norm import BatchNorm
from hpctrain.nn.chain import Chain, Recompute, Residual
from hpctrain.nn.conv import Conv2d, MeanPool
from hpctrain.nn.layer import MAX_LAYERS, Layer, Shape
from hpctrain.nn.linear import Linear
from hpctrain.nn.model import Model
from hpctrain.nn.reshape import AddChannel, Subsample

Count = Annotated[int, pydantic.Field(gt=0)]


@options
class ResNetOptions:
    """ResNet-20 by default; `blocks` per group and `channels` per group define other ResNets.

    Images are channels last: (h, w) or (h, w, c). With `recompute` each block saves only its input,
    and computes its other values again in backward.
    """

    blocks: Annotated[int, pydantic.Field(gt=0, le=MAX_LAYERS)] = 3
    channels: Annotated[list[Count], pydantic.Field(min_length=1)] = pydantic.Field(
        default_factory=lambda: [16, 32, 64]
    )
    recompute: bool = False

    def build(self, input_shape: Shape | None, outputs: int | None) -> Model:
        """Return the model for images of `input_shape`, with `outputs` classes or features.

        Raises UsageError if either is None or samples are not images.
        """
        if input_shape is None or outputs is None:
            raise UsageError(
                "[model] resnet20: expected the shape of images and the number of outputs, "
                "seen none"
            )
        shape = tuple(input_shape)
        if len(shape) not in (2, 3):
            raise UsageError(
                f"[model] resnet20: expected images (h, w) or (h, w, channels), seen {shape}"
            )
        channel_layers: dict[str, Layer] = {"channel": AddChannel()} if len(shape) == 2 else {}
        head: dict[str, Layer] = {"pool": MeanPool(), "linear": Linear(outputs)}
        stem = {**_conv_and_norm("", self.channels[0], 1), "relu": ReLU()}
        return Model(channel_layers | stem | self._group_layers() | head, shape)

    def _group_layers(self) -> dict[str, Layer]:
        layers: dict[str, Layer] = {}
        input_channels = self.channels[0]
        for i, channels in enumerate(self.channels, 1):
            for j in range(1, self.blocks + 1):
                stride = 2 if i > 1 and j == 1 else 1
                layer = block(input_channels, channels, stride)
                layers[f"group{i}_block{j}"] = Recompute(layer) if self.recompute else layer
                input_channels = channels
        return layers


def block(input_channels: int, channels: int, stride: int) -> Layer:
    """Return a residual block: two convolutions, and a shortcut without parameters."""
    body: dict[str, Layer] = {
        **_conv_and_norm("1", channels, stride),
        "relu1": ReLU(),
        **_conv_and_norm("2", channels, 1),
    }
    changes_shape = stride > 1 or channels != input_channels
    shortcut: dict[str, Layer] = {"subsample": Subsample(stride, channels)} if changes_shape else {}
    return Chain({"sum": Residual(body, shortcut), "relu": ReLU()})


def _conv_and_norm(suffix: str, channels: int, stride: int) -> dict[str, Layer]:
    # A bias would have no effect: the normalization subtracts the mean of each channel.
    conv = Conv2d(channels, kernel=3, stride=stride, padding=1, bias=False)
    return {f"conv{suffix}": conv, f"norm{suffix}": BatchNorm()}
