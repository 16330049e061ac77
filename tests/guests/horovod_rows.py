"""What the rows of `horovod_training.py` and `horovod_states.py` have in common."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import torch
from torch import nn

import hpctrain.horovod.torch as hvd

#: The rows of a script, in their order.
ROWS = {}
STEPS, SHARE = 4, 6
torch.set_num_threads(1)


def row(function):
    ROWS[function.__name__] = function
    return function


@contextmanager
def raises(error, text):
    try:
        yield
    except error as raised:
        assert text in str(raised), (text, str(raised))
    else:
        raise AssertionError(f"expected {error.__name__}: {text}")


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def make_batches(passes=1):
    """Return (steps, passes, ranks, samples, features)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, passes, hvd.size(), SHARE, 5, generator=generator).double()


def loss_of(model, x):
    return model(x).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def differ(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def names(model):
    return {"named_parameters": model.named_parameters()}


def run():
    """Run the rows that the command line names, or all, and print their names."""
    hvd.init()
    for name in sys.argv[1:] or ROWS:
        ROWS[name]()
        if hvd.rank() == 0:
            print(name, flush=True)
    hvd.shutdown()
