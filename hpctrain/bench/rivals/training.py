"""Training steps of PyTorch on a dense model with our initial values, for DDP and Horovod alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.bench.rivals import Dense

Wrap = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]


def stepper(dense: Dense, wrap: Wrap) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return step(x, y), which trains on a rank's share and returns its summed loss.

    `wrap` makes network and optimizer communicate.
    """
    network, optimizer = wrap(*_build(dense))
    loss_of = nn.CrossEntropyLoss()  # the mean over the share; wrappers average over ranks

    def step(x: np.ndarray, y: np.ndarray) -> float:
        optimizer.zero_grad()
        loss = loss_of(network(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        return loss.item() * len(y)

    return step


def _build(dense: Dense) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers: list[nn.Module] = [nn.Flatten()]
    for weight, bias in dense.layers:
        layer = nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight.T)))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    network = nn.Sequential(*layers[:-1])  # no ReLU behind the last
    # One pass over parameters, gradients and momentum: the fastest that PyTorch has on CPUs.
    options: Mapping[str, Any] = {**dense.sgd, "fused": True}
    return network, torch.optim.SGD(network.parameters(), **options)
