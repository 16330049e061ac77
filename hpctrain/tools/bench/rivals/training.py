"""Training steps of PyTorch on a dense model with our initial values, for DDP and Horovod alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.tools.bench.rivals import DenseModel, Rival, StepFunction


class TorchRival(Rival):
    """A library that trains with PyTorch."""

    def step(self, dense: DenseModel, without_communication: bool) -> StepFunction:
        """Return step(x, y), which trains on a rank's share and returns its summed loss."""
        network: nn.Module = build_network(dense)
        optimizer = make_optimizer(network, dense)
        if not without_communication:
            network, optimizer = self.wrap(network, optimizer)
        loss_function = (
            nn.CrossEntropyLoss()
        )  # the mean over the share; wrappers average over ranks

        def step(x: np.ndarray, y: np.ndarray) -> float:
            optimizer.zero_grad()
            loss = loss_function(network(torch.from_numpy(x)), torch.from_numpy(y))
            loss.backward()
            optimizer.step()
            return loss.item() * len(y)

        return step

    def wrap(self, network: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return a network and an optimizer that reduce gradients during backward."""
        raise NotImplementedError


def make_optimizer(network: nn.Module, dense: DenseModel) -> torch.optim.Optimizer:
    """Return PyTorch's SGD for `network`."""
    # One pass over parameters, gradients and momentum: the fastest that PyTorch has on CPUs.
    sgd_options: Mapping[str, Any] = {**dense.sgd_options, "fused": True}
    return torch.optim.SGD(network.parameters(), **sgd_options)


def build_network(dense: DenseModel) -> nn.Module:
    """Return the dense model as a module."""
    layers: list[nn.Module] = [nn.Flatten()]
    for weight, bias in dense.layers:
        layer = nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight.T)))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])  # no ReLU after the last layer
