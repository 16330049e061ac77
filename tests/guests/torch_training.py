"""A few steps of a module by the Trainer, and by a plain loop of PyTorch in float64."""

from __future__ import annotations

import numpy as np
import torch
from ranks import run_on
from torch import nn

import hpctrain as ht

FEATURES, RATE = 4, 0.1
LIMIT = 1e-12  #: of the largest difference, relative to the largest parameter


def make_module(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def parameters_of(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


def by_trainer(ranks, make_data, batch, loss="cross_entropy", make=make_module, **options):
    """Return the parameters of rank 0 after training on `ranks` threads; `options`: of fit."""
    engine = options.pop("engine", "allreduce")

    modules = [make() for _ in range(ranks)]  # not by threads, which share a generator

    def train(world):
        module = modules[world.rank]
        trainer = ht.torch.Trainer(
            module, ht.optim.sgd(rate=RATE), engine, loss, precision="float64", world=world
        )
        with trainer:
            summary = trainer.fit(make_data(), batch=batch, **options)
        return parameters_of(module), summary

    return run_on("threads", ranks, train)[0]


def by_plain_loop(batches, loss=nn.functional.cross_entropy, make=make_module):
    """Return the parameters after a step for each of `batches`."""
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for x, y in batches:
        optimizer.zero_grad()
        loss(module(x), y).backward()
        optimizer.step()
    return parameters_of(module)


def difference(a, b):
    return np.abs(a - b).max() / np.abs(b).max()
