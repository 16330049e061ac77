"""Our models in PyTorch, for steps beside ours; imported where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional


class Text(NamedTuple):
    """The sizes of a transformer over bytes."""

    layers: int
    width: int
    heads: int
    length: int


def step_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """Return a training step on one batch: forward, backward and SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(x)
        functional.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return step


def mlp_of(widths: list[int]) -> torch.nn.Module:
    """Return dense layers with ReLU between."""
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(widths):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def transformer_of(text: Text) -> torch.nn.Module:
    """Return our transformer, with PyTorch's fused attention."""
    return Transformer(text)


class Block(torch.nn.Module):
    """The block of our transformer."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        width, self.heads = text.width, text.heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide = torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        wide = functional.gelu(self.wide(self.norm2(x)), approximate="tanh")
        return x + self.narrow(wide)


class Transformer(torch.nn.Module):
    def __init__(self, text: Text) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, text.width)
        self.places = torch.nn.Parameter(torch.zeros(text.length, text.width))
        self.blocks = torch.nn.Sequential(*[Block(text) for _ in range(text.layers)])
        self.norm = torch.nn.LayerNorm(text.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(self.table(x) + self.places)) @ self.table.weight.T


class Residual(torch.nn.Module):
    """The block of our ResNet."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.stride, self.more = 1 + (channels != before), channels - before
        self.conv1 = torch.nn.Conv2d(before, channels, 3, self.stride, 1, bias=False)
        self.conv2 = torch.nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = torch.nn.BatchNorm2d(channels), torch.nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        if self.more:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.more))
        return functional.relu(x + y)


def resnet20_of() -> torch.nn.Module:
    """Return our ResNet-20, for grey images."""
    layers = [torch.nn.Conv2d(1, 16, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(16)]
    layers.append(torch.nn.ReLU())
    for before, channels in ((16, 16), (16, 32), (32, 64)):
        layers.append(Residual(before, channels))
        layers += [Residual(channels, channels) for _ in range(2)]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    )
