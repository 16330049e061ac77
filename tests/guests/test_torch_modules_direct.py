"""Gradients of large matrices, which backward writes into the arena: those of plain PyTorch."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from guests.plain import state_of, train_on
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpctrain as ht
from hpctrain.gradients.replica import Batch
from hpctrain.nn import Key
from hpctrain.optim.absent import Ranges
from hpctrain.optim.optimizer import BLOCK_ELEMENTS
from hpctrain.torch.modules import direct_gradients
from hpctrain.torch.modules.model import TorchModel
from hpctrain.torch.modules.replica import TorchReplica

ROWS, WIDTH = 4, 512  # of float64: a matrix (WIDTH, WIDTH) has 2 MiB


class Recorder(TorchReplica):
    """Records which gradients came in their place in the arena."""

    direct: frozenset[str] = frozenset()

    def _take_gradient(self, name, parameter):
        if parameter.grad.data_ptr() == self._grads[name].data_ptr():
            self.direct |= {name}
        super()._take_gradient(name, parameter)


class Net(nn.Module):
    """Two large matrices, as a table of forward passes multiplies them."""

    def __init__(self, forward, bias=True):
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(2))
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def chain(net, x):
    return net.second(torch.relu(net.first(x)))


def texts(net, x):
    return chain(net, x[:, None] * torch.arange(3)[:, None]).mean(1)


def not_transposed(net, x):
    return torch.tanh(x @ net.first.weight) @ net.second.weight


def twice(net, x):
    return net.second(torch.relu(net.first(torch.relu(net.first(x)))))


def twice_across_checkpoints(net, x):
    x = checkpoint(net.first, x, use_reentrant=False)
    return net.second(checkpoint(net.first, torch.relu(x), use_reentrant=False))


def checkpointed(net, x, use_reentrant):
    x = x.requires_grad_(use_reentrant)
    return checkpoint(partial(chain, net), x, use_reentrant=use_reentrant)


def head_unused(net, x):
    return net.first(x)


def with_gradient_penalty(net, x):
    y = chain(net, x.requires_grad_())
    weight = net.first.weight
    dx, dw = torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)
    return y + dx + dw.sum()


def with_own_gradient(net, x):
    """The gradient of a pass within forward stays as it is until backward has read it."""
    y = chain(net, x)
    (dw,) = torch.autograd.grad(y.sum(), net.first.weight, retain_graph=True)
    return y + nn.functional.linear(x, dw.detach(), None) * net.first.weight.sum()


class Doubling(torch.autograd.Function):
    """A product whose backward keeps one of the gradient's shape, and returns another."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T * 2

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        GRADIENTS.append(dy.T @ x)
        return dy @ weight * 2, GRADIENTS[-1] * 2


def own_function(net, x):
    return net.second(Doubling.apply(x, net.first.weight))


class Attention(nn.Module):
    """A matrix that PyTorch's own functions multiply."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        x = x[:, None] * torch.arange(3)[:, None]
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


def keep(gradients, gradient):
    gradients.append(gradient)


def prepare_hook(net):
    """A hook of the user's own keeps the gradient: its memory is not written any more."""
    net.first.weight.register_hook(partial(keep, GRADIENTS))


def prepare_frozen(net):
    net.first.weight.requires_grad_(False)


GRADIENTS: list[torch.Tensor] = []
BOTH, FIRST, SECOND = {"first.weight", "second.weight"}, {"first.weight"}, {"second.weight"}
#: The module, a change of it, and the names of gradients that need no copy.
TABLE = {
    "a chain": (partial(Net, chain), None, BOTH),
    "no bias": (partial(Net, chain, bias=False), None, BOTH),
    "texts": (partial(Net, texts), None, BOTH),
    "not transposed": (partial(Net, not_transposed), None, BOTH),
    "used twice": (partial(Net, twice), None, SECOND),
    "twice across checkpoints": (partial(Net, twice_across_checkpoints), None, SECOND),
    "checkpoint": (partial(Net, partial(checkpointed, use_reentrant=False)), None, BOTH),
    "reentrant": (partial(Net, partial(checkpointed, use_reentrant=True)), None, BOTH),
    "unused": (partial(Net, head_unused), None, FIRST),
    "gradient penalty": (partial(Net, with_gradient_penalty), None, None),
    "gradient in forward": (partial(Net, with_own_gradient), None, None),
    "attention": (Attention, None, {"attention.in_proj_weight", "attention.out_proj.weight"}),
    "a hook": (partial(Net, chain), prepare_hook, SECOND),
    "a function": (partial(Net, own_function), None, SECOND),
    "frozen": (partial(Net, chain), prepare_frozen, SECOND),
}


def squares(outputs, targets):
    return (outputs - targets).square().mean()


def make_batch(rows, seed=1):
    x, y = torch.randn((2, rows, WIDTH), generator=torch.Generator().manual_seed(seed)).double()
    return x, y


def plain_gradients(net, pieces):
    """Return the gradients of the mean over the samples of all `pieces`."""
    net.zero_grad()
    for x, y in pieces:
        (squares(net(x.clone()), y) * (len(x) / sum(len(x) for x, _ in pieces))).backward()
    return {n: p.grad for n, p in net.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("row", TABLE)
def test_gradients_are_those_of_pytorch(row, micro_batches):
    make, prepare, direct = TABLE[row]
    torch.manual_seed(0)
    net = make().double()
    if prepare is not None:
        prepare(net)
    x, y = make_batch(2 * WIDTH if row == "a chain" else ROWS)  # two pieces of WIDTH rows
    pieces = [*zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)]
    expected = plain_gradients(copy.deepcopy(net), pieces)
    GRADIENTS.clear()
    replica = Recorder(TorchModel(net, squares), 0, "float64", on_gpu=False)
    replica.micro_batches = micro_batches
    for step in range(2):  # into memory that was written before
        batch = Batch.of(x.numpy(), y.numpy())
        replica.gradient(batch, 1 / len(x), Key(0, step, 0), lambda name: None)
        for name, gradient in replica.arena.views(replica.arena.grad).items():
            if expected[name] is None:
                assert (gradient == 0).all()
                assert np.signbit(gradient).all()
            else:
                limit = 1e-12 * abs(expected[name]).max().item()
                assert abs(gradient - expected[name].numpy()).max() <= limit, name
    assert direct is None or replica.direct == direct
    memory = replica._grads["first.weight"].data_ptr() if GRADIENTS else None
    assert memory not in [gradient.data_ptr() for gradient in GRADIENTS]


def test_a_product_of_negative_zeros_is_a_gradient():
    """Of one sample, 0, each element is -0.0, which marks a slot without a gradient."""
    net = nn.Linear(WIDTH, WIDTH, bias=False).double()
    replica = Recorder(TorchModel(net, squares), 0, "float64", on_gpu=False)
    batch = Batch.of(np.zeros((1, WIDTH)), np.ones((1, WIDTH)))
    replica.gradient(batch, 1.0, Key(0, 0, 0), lambda name: None)
    assert replica.direct == {"weight"}
    grad = replica.arena.grad
    assert np.signbit(grad).any()
    ranges = [slice(i, i + BLOCK_ELEMENTS) for i in range(0, grad.size, BLOCK_ELEMENTS)]
    assert Ranges([slice(0, grad.size), *ranges]).find_absent(grad) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_ordered_sums_have_the_bits_of_copied_gradients(ranks, monkeypatch):
    torch.manual_seed(0)
    net, data = Net(chain).double(), tuple(x.numpy() for x in make_batch(16))
    options = {"engine": ht.engines.AllReduce(reduction="ordered"), "loss": squares, "steps": 2}
    trained = train_on(ranks, net, data, **options)
    monkeypatch.setattr(direct_gradients, "MIN_BYTES", 1 << 40)
    (copied,) = train_on(1, net, data, **options)
    expected = state_of(copied)
    for own in trained:
        assert all(np.array_equal(x, expected[name]) for name, x in state_of(own).items())
