"""A module trained by plain PyTorch in one process, and by the Trainer on thread ranks."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch
from ranks import run_on
from torch import nn

import hpctrain as ht
from hpctrain.data import Sampler

STEPS, BATCH, SAMPLES, FEATURES, CLASSES = 4, 8, 26, 6, 3
RATE, MOMENTUM = 0.1, 0.9


def make_samples(shape=(FEATURES,), samples=SAMPLES):
    generator = np.random.default_rng(0)
    return generator.normal(size=(samples, *shape)), generator.integers(CLASSES, size=samples)


def train_plain(module, data, steps=STEPS, batch=BATCH, loss=nn.functional.cross_entropy):
    """Train a copy of `module` on the batches of the Trainer; return it."""
    module, (x, y) = deepcopy(module), map(torch.from_numpy, data)
    sampler = Sampler(len(x), batch, 0)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=MOMENTUM)
    for step in range(steps):
        rows = torch.from_numpy(np.asarray(sampler.batch_indexes(step)))
        optimizer.zero_grad()
        loss(module(x[rows]), y[rows]).backward()
        optimizer.step()
    return module


def train_on(ranks, module, data, engine="allreduce", steps=STEPS, batch=BATCH, **options):
    """Train a copy of `module` on each rank; return the copies."""
    copies = [deepcopy(module) for _ in range(ranks)]
    fit = {name: options.pop(name) for name in ("evaluate", "micro_batches") if name in options}

    def train(world):
        optimizer = ht.optim.sgd(rate=RATE, momentum=MOMENTUM)
        own = copies[world.rank]
        with ht.torch.Trainer(own, optimizer, engine, world=world, **options) as trainer:
            trainer.fit(data, steps=steps, batch=batch, **fit)

    run_on("threads", ranks, train)
    return copies


def state_of(module):
    """Return all parameters and buffers by name, float64."""
    return {name: x.detach().double().numpy() for name, x in module.state_dict().items()}


def difference(first, second):
    """Return the largest difference of two modules' states; infinite for other names."""
    a, b = state_of(first), state_of(second)
    if a.keys() != b.keys():
        return float("inf")
    return max(abs(a[name] - b[name]).max(initial=0) for name in a)
