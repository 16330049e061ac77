"""Modules trained by optimizers of PyTorch: under engines, and by plain PyTorch in one process."""

from __future__ import annotations

import copy
import io
from contextlib import redirect_stdout

import numpy as np
import torch
from ranks import run_on
from torch import nn

import hpctrain as ht

STEPS, LIMIT = 10, 1e-12
SAMPLES = 24  #: a batch: the order of samples does not matter
generator = np.random.default_rng(0)
X, LABELS = generator.normal(size=(SAMPLES, 4)), generator.integers(3, size=SAMPLES)


class Net(nn.Module):
    """Two layers, and a head that only some steps use, by their number."""

    def __init__(self, uses_head=lambda step: False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.head, self.scale = nn.Linear(8, 3), nn.Parameter(torch.ones(()))
        self.uses_head, self.calls, self.calls_per_step = uses_head, 0, 1

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        y = self.scale * self.second(hidden)
        if self.training:
            step = self.calls // self.calls_per_step
            y = y + self.head(hidden) if self.uses_head(step) else y
            self.calls += 1
        return y


torch.manual_seed(0)
INITIAL = Net().double()  #: made once: ranks that are threads share the random generator


def make_net(uses_head=lambda step: False):
    net = copy.deepcopy(INITIAL)
    net.uses_head = uses_head
    return net


def groups_of(net, **options):
    """Return the parameters in two groups, which alternate; the second has `options`."""
    layers = [net.first, net.second, net.head]
    weights = [layer.weight for layer in layers]
    return [
        {"params": [*weights, net.scale]},
        {"params": [layer.bias for layer in layers], **options},
    ]


def step_plainly(net, optimizer, steps=1, scheduler=None, samples=(X, LABELS)):
    """Train `net` by plain PyTorch."""
    net.train()
    x, labels = map(torch.tensor, samples)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    optimizer.zero_grad()


def train_plainly(prepare, steps=STEPS, net=INITIAL, samples=(X, LABELS)):
    """Return the parameters of a copy of `net` after `steps` of plain PyTorch.

    `prepare(net)` returns the optimizer and the scheduler, a function that makes one, or None.
    """
    net = copy.deepcopy(net)
    optimizer, schedule = prepare(net)
    scheduler = schedule(optimizer) if callable(schedule) else schedule
    step_plainly(net, optimizer, steps, scheduler, samples)
    return values(net)


def train(
    prepare, ranks=1, engine="allreduce", steps=STEPS, net=INITIAL, samples=(X, LABELS), **options
):
    """Return the parameters of each worker after `steps` of the Trainer; as `train_plainly`."""

    def on_rank(world):
        own = copy.deepcopy(net)
        optimizer, schedule = prepare(own)
        if blocks := getattr(engine, "blocks", None):
            own.calls_per_step = blocks // ranks
        trainer = ht.torch.Trainer(
            own, optimizer, engine, schedule=schedule, world=world, precision="float64"
        )
        with trainer:
            trainer.fit(samples, steps=steps, batch=SAMPLES, **options)
            return None if trainer.engine.worker is None else values(own)

    with redirect_stdout(io.StringIO()):
        return [x for x in run_on("threads", ranks, on_rank) if x is not None]


def values(net):
    return np.concatenate([p.detach().numpy().ravel().copy() for p in net.parameters()])


def difference(result, expected):
    """Return the largest difference of any rank, relative to the movement of parameters."""
    return max(np.linalg.norm(r - expected) for r in result) / np.linalg.norm(expected)


#: name: (ranks, engine); each row's sums are those of all samples
ENGINES = {
    "one rank": (1, "allreduce"),
    "2 ranks": (2, "allreduce"),
    "3 ranks": (3, "allreduce"),
    "2 ranks, sharded": (2, ht.engines.AllReduce(shard_optimizer=True)),
    "a server": (3, "ps-sync"),
    "shared parameters": (2, ht.engines.AllReduce(share_parameters=True)),
    "priority": (2, ht.engines.AllReduce(priority=True)),
    "ordered": (3, ht.engines.AllReduce(reduction="ordered", blocks=6)),
}
