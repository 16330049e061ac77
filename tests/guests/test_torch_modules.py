"""Modules of PyTorch under the Trainer equal plain PyTorch in one process, in float64."""

from __future__ import annotations

import pytest
import torch
from guests.plain import (
    CLASSES,
    FEATURES,
    difference,
    make_samples,
    train_on,
    train_plain,
)
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import hpctrain as ht

pytestmark = pytest.mark.either

LIMIT = 1e-12
ENGINES = {
    "allreduce": "allreduce",
    "ps-sync": ht.engines.PsSync(placement="colocated"),
    "priority": ht.engines.AllReduce(priority=True),
}


def make_mlp(middle=None):
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 8), middle or nn.Tanh(), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


class Wrapped(nn.Module):
    """A user's own wrapper: an attribute `module` beside a `weight` of its own."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
        self.weight = nn.Parameter(torch.full((CLASSES, FEATURES), 0.1, dtype=torch.float64))

    def forward(self, x):
        return self.module(x) + x @ self.weight.T


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.second = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))


class RunningMean(nn.Module):
    """Writes buffers in each forward pass; `replaces`: by assignment."""

    def __init__(self, replaces=False):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(2**40 + 1))
        self.register_buffer("is_begun", torch.tensor(False))
        self.replaces = replaces

    def forward(self, x):
        if self.training:
            mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.replaces:
                self.mean, self.calls = mean, self.calls + 1
            else:
                self.mean.copy_(mean)
                self.calls += 1
            self.is_begun.fill_(True)
            return self.linear(x)
        return self.linear(x - self.mean)


class Instances(nn.Module):
    """Channels of 2 numbers, normalized for each sample, with running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
        self.linear = nn.Linear(6, CLASSES)
        self.double()

    def forward(self, x):
        return self.linear(self.norm(x.reshape(len(x), 3, 2)).flatten(1))


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = make_mlp(), nn.Linear(CLASSES, CLASSES).double()

    def forward(self, x):
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


class Hooked(nn.Module):
    """Hooks of a user: outputs are doubled, a gradient is halved."""

    def __init__(self):
        super().__init__()
        self.inner = make_mlp()
        self.inner[0].register_forward_hook(lambda module, inputs, output: 2 * output)
        self.inner[2].register_full_backward_hook(lambda module, dx, dy: tuple(0.5 * d for d in dx))
        self.inner[2].weight.register_hook(lambda gradient: 3 * gradient)

    def forward(self, x):
        return self.inner(x)


def make_frozen():
    module = make_mlp()
    module[0].requires_grad_(False)
    return module


def make_with_eval(norm):
    """Fine-tuning: a norm in evaluation mode keeps its statistics."""
    module = make_mlp(norm)
    norm.running_mean.fill_(0.3)
    norm.eval()
    return module


def make_compiled():
    return torch.compile(make_mlp(), backend="eager")


#: name: (makes a module, whether it equals plain PyTorch where shares of ranks are uneven)
MODULES = {
    "mlp": (make_mlp, True),
    "batch norm": (lambda: make_mlp(nn.BatchNorm1d(8)), True),
    "batch norm in evaluation mode": (lambda: make_with_eval(nn.BatchNorm1d(8)), True),
    "an attribute named module": (Wrapped, True),
    "tied": (Tied, True),
    "frozen": (make_frozen, True),
    "hooks": (Hooked, True),
    "recomputed": (Recomputed, True),
    "weight norm": (lambda: _normed(parametrizations.weight_norm), True),
    "spectral norm": (lambda: _normed(parametrizations.spectral_norm), False),
    "orthogonal": (lambda: _normed(parametrizations.orthogonal), True),
    "compiled": (make_compiled, True),
    "running mean": (RunningMean, False),
    "running mean, replaced": (lambda: RunningMean(replaces=True), False),
    "instance norm": (Instances, False),
}


def _normed(parametrize):
    module = make_mlp()
    parametrize(module[0])
    return module


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MODULES)
def test_each_module_equals_plain_pytorch(name, ranks, engine):
    make, is_equal_if_uneven = MODULES[name]
    module = make()
    if engine == "priority" and ("norm" in name and "batch" in name):
        pytest.skip("the mean over ranks waits for sums")
    batch = 8 if is_equal_if_uneven else 6
    data = make_samples(samples=26 if is_equal_if_uneven else 24)
    plain = train_plain(module, data, batch=batch)
    assert difference(plain, module) > 1e-3  # it has learned
    for trained in train_on(ranks, module, data, ENGINES[engine], batch=batch):
        assert difference(plain, trained) <= LIMIT
        assert all(x.dtype is y.dtype for x, y in _pairs(plain, trained))


def _pairs(first, second):
    return zip(first.state_dict().values(), second.state_dict().values(), strict=True)
