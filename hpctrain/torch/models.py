"""The modules of built-in recipes, written as a user would: functions that return a module."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hpctrain.core.errors import UsageError

try:
    from torch import nn
except ImportError:
    raise UsageError("this model needs PyTorch: pip install 'hpctrain[torch]'") from None


def cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    channels: Sequence[int] = (16, 32),
    dropout: float = 0.25,
    normalizes: bool = True,
) -> nn.Module:
    """Return a network for images (height, width), or rows of pixels of a square image.

    A 3 x 3 convolution, batch normalization if it `normalizes`, ReLU and 2 x 2 maxima for each
    number of `channels`.
    """
    size = round(prod(input_shape) ** 0.5)
    height, width = input_shape if len(input_shape) == 2 else (size, size)
    layers: list[nn.Module] = [nn.Flatten(), nn.Unflatten(1, (1, height, width))]
    for inputs, count in zip((1, *channels), channels, strict=False):
        convolution = nn.Conv2d(inputs, count, 3, padding=1)
        norm = [nn.BatchNorm2d(count)] if normalizes else []
        layers += [convolution, *norm, nn.ReLU(), nn.MaxPool2d(2)]
        height, width = height // 2, width // 2
    features = channels[-1] * height * width
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, outputs))
