"""Our models in PyTorch, for steps beside ours; imported where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional


class TransformerSizes(NamedTuple):
    """The sizes of a transformer over bytes."""

    layers: int
    width: int
    heads: int
    length: int


def make_step(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """Return a training step on one batch: forward, backward and SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(x)
        functional.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return step


def make_mlp(widths: list[int]) -> torch.nn.Module:
    """Return dense layers with ReLU between."""
    layers: list[torch.nn.Module] = []
    for in_width, out_width in pairwise(widths):
        layers += [torch.nn.Linear(in_width, out_width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def make_transformer(sizes: TransformerSizes) -> torch.nn.Module:
    """Return our transformer, with PyTorch's fused attention."""
    return Transformer(sizes)


class Block(torch.nn.Module):
    """The block of our transformer."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        width, self.heads = sizes.width, sizes.heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.expand = torch.nn.Linear(width, 4 * width)
        self.contract = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        expand = functional.gelu(self.expand(self.norm2(x)), approximate="tanh")
        return x + self.contract(expand)


class Transformer(torch.nn.Module):
    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, sizes.width)
        self.positions = torch.nn.Parameter(torch.zeros(sizes.length, sizes.width))
        self.blocks = torch.nn.Sequential(*[Block(sizes) for _ in range(sizes.layers)])
        self.norm = torch.nn.LayerNorm(sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(self.embedding(x) + self.positions)) @ self.embedding.weight.T


class Residual(torch.nn.Module):
    """The block of our ResNet."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.stride, self.extra_channels = 1 + (channels != in_channels), channels - in_channels
        self.conv1 = torch.nn.Conv2d(in_channels, channels, 3, self.stride, 1, bias=False)
        self.conv2 = torch.nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = torch.nn.BatchNorm2d(channels), torch.nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        if self.extra_channels:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.extra_channels))
        return functional.relu(x + y)


def make_resnet20() -> torch.nn.Module:
    """Return our ResNet-20, for grey images."""
    layers = [torch.nn.Conv2d(1, 16, 3, 1, 1, bias=False), torch.nn.BatchNorm2d(16)]
    layers.append(torch.nn.ReLU())
    for in_channels, channels in ((16, 16), (16, 32), (32, 64)):
        layers.append(Residual(in_channels, channels))
        layers += [Residual(channels, channels) for _ in range(2)]
    return torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 10)
    )
