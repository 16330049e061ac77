"""Parameters without a gradient are left alone, on any number of ranks, as PyTorch leaves them."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from guests.optimizer_cases import (
    ENGINES,
    INITIAL,
    LABELS,
    LIMIT,
    SAMPLES,
    STEPS,
    X,
    difference,
    groups_of,
    make_net,
    train,
    train_plainly,
    values,
)
from torch import nn, optim

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.optim.absent import Ranges
from hpctrain.torch.modules.optimizers.attributes import ELEMENTWISE
from hpctrain.training.run_options import CheckpointOptions

pytestmark = pytest.mark.either

IS_HEAD = np.concatenate(
    [np.full(p.numel(), name.startswith("head")) for name, p in INITIAL.named_parameters()]
)
#: name: whether a step uses the head
USES = {
    "never": lambda step: False,
    "at first": lambda step: step < 3,
    "later": lambda step: step >= 4,
    "every other": lambda step: step % 2 == 1,
}
#: With momentum and decay: a gradient of zeros would move parameters.
MOVING = {"SGD": {"momentum": 0.9, "dampening": 0.5}, "RMSprop": {"momentum": 0.9}}


def make(name, net):
    options = dict(MOVING.get(name, {}))
    if name not in ("Rprop",):
        options["weight_decay"] = 0.1
    return getattr(optim, name)(groups_of(net, lr=0.02), lr=0.05, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("use", USES)
def test_a_head_moves_only_where_the_loss_depends_on_it(use, name, engine):
    net = make_net(USES[use])

    def prepare(own):
        return make(name, own), None

    expected = train_plainly(prepare, net=net)
    assert difference(train(prepare, *ENGINES[engine], net=net), expected) <= LIMIT


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "make_own, make_plain",
    [
        (
            lambda: ht.optim.sgd(rate=0.1, momentum=0.9, weight_decay=0.1),
            lambda net: optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        ),
        (lambda: ht.optim.adamw(rate=0.05, weight_decay=0.1, clip_norm=0.3), None),
        (lambda: ht.optim.lamb(rate=0.05), None),
        (lambda: ht.optim.lars(rate=1.0, weight_decay=0.1), None),
    ],
    ids=["sgd", "adamw", "lamb", "lars"],
)
def test_our_own_optimizers_leave_it_alone_too(make_own, make_plain, use, engine):
    ranks, kind = ENGINES[engine]
    own = make_own()
    if engine == "priority" and own.needs_norms:
        pytest.skip("refused: buckets have no norm of whole tensors")
    net = make_net(USES[use])
    if make_plain is not None:
        expected = train_plainly(lambda net: (make_plain(net), None), net=net)
    else:
        (expected,) = train(lambda net: (make_own(), None), net=net)
    assert difference(train(lambda net: (own, None), ranks, kind, net=net), expected) <= LIMIT
    if use == "never":
        assert np.array_equal(expected[IS_HEAD], values(INITIAL)[IS_HEAD])


class Rows(nn.Module):
    """The head is used for samples of one sign alone: of some ranks, and micro-batches."""

    def __init__(self):
        super().__init__()
        self.net = copy.deepcopy(INITIAL)

    def forward(self, x):
        y = self.net(x)
        is_last = x[:, 0] >= np.sort(X[:, 0])[-1]  # one sample, on one rank
        if bool(is_last.any()):
            hidden = torch.tanh(self.net.first(x[is_last]))
            y = y.index_add(0, is_last.nonzero()[:, 0], self.net.head(hidden))
        return y


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_of_one_rank_is_a_gradient_of_all(engine, micro_batches):
    def prepare(net):
        return optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1), None

    expected = train_plainly(prepare, net=Rows())
    options = {"net": Rows(), "micro_batches": micro_batches}
    assert difference(train(prepare, *ENGINES[engine], **options), expected) <= LIMIT


class Wide(nn.Module):
    """Parameters over several blocks of the planes, so that shards have parts of them."""

    def __init__(self):
        super().__init__()
        self.net = copy.deepcopy(INITIAL)
        self.wide, self.head = (
            nn.Parameter(torch.full((WIDTH, 4), 1e-3 * i).double()) for i in (1, 2)
        )
        self.calls = 0

    def forward(self, x):
        y = self.net(x) + (x @ self.wide.T).sum(1, keepdim=True) * SIGNS
        if self.training:
            if self.calls % 3 == 1:
                y = y + (x @ self.head.T).sum(1, keepdim=True) * SIGNS
            self.calls += 1
        return y


WIDTH, SIGNS = 30_000, torch.tensor([1e-3, -1e-3, 2e-3])
SHARDS = {
    "2 ranks": (2, ht.engines.AllReduce(shard_optimizer=True)),
    "3 ranks": (3, ht.engines.AllReduce(shard_optimizer=True)),
    "2 servers": (4, ht.engines.PsSync(servers=2)),
    "shared": (3, ht.engines.AllReduce(share_parameters=True)),
    "one rank": (1, "allreduce"),
}


@pytest.mark.parametrize("resumed", SHARDS)
@pytest.mark.parametrize("saved", SHARDS)
def test_shards_save_and_load_the_counts_of_their_own_parameters(tmp_path, saved, resumed):
    """With a head that was updated in one of the 3 saved steps, across blocks and shards."""

    def prepare(net):
        return optim.Adam(net.parameters(), lr=1e-3, weight_decay=0.1), None

    expected = train_plainly(prepare, steps=6, net=Wide())
    run = {"out": tmp_path / "run", "checkpoints": CheckpointOptions(every_steps=3)}
    train(prepare, *SHARDS[saved], steps=3, net=Wide(), **run)
    result = train(prepare, *SHARDS[resumed], steps=6, net=Wide(), resume=True, **run)
    assert difference(result, expected) <= LIMIT


class Zero(nn.Module):
    """The gradient of `still` is -0.0 everywhere: it is there, and zero."""

    def __init__(self):
        super().__init__()
        self.net, self.still = copy.deepcopy(INITIAL), nn.Parameter(torch.ones(3).double())

    def forward(self, x):
        return self.net(x) + NegativeZero.apply(self.still)


class NegativeZero(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter):
        return torch.zeros_like(parameter)

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, -0.0)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_of_negative_zeros_is_a_gradient(engine, micro_batches):
    def prepare(net):
        return optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), None

    net = Zero()
    expected = train_plainly(prepare, net=net)
    assert not np.array_equal(expected[-3:], [1, 1, 1])  # it decays
    options = {"net": net, "micro_batches": micro_batches}
    assert difference(train(prepare, *ENGINES[engine], **options), expected) <= LIMIT


WIRES = {
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    **{name: {"algorithm": name} for name in (
        "ring", "tree", "recursive-doubling", "halving-doubling", "direct", "hierarchical",
    )},
}  # fmt: skip


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_wire_keeps_the_mark(wire, ranks):
    def prepare(net):
        return optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1), None

    engine = ht.engines.AllReduce(**WIRES[wire])
    (first, *_) = train(prepare, ranks, engine, steps=3)
    assert np.array_equal(first[IS_HEAD], values(INITIAL)[IS_HEAD])
    assert not np.allclose(first[~IS_HEAD], values(INITIAL)[~IS_HEAD])


#: Equal samples: ranks have equal gradients, of matrices of rank 1
EQUAL = np.repeat(X[:1], SAMPLES, 0), np.repeat(LABELS[:1], SAMPLES)
RATIO = 0.25
COMPRESSIONS = {
    "top-k": {"compression": "top-k", "compression_ratio": RATIO},
    "powersgd": {"compression": "powersgd", "compression_rank": 1},
}


def keep_largest(optimizer):
    """Replace each matrix's gradient by its largest elements, with error feedback."""
    residuals = {}

    def replace(*_):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and p.dim() > 1:
                total = p.grad + residuals.get(p, 0.0)
                largest = total.abs().view(-1).topk(int(np.ceil(RATIO * p.numel()))).indices
                p.grad = torch.zeros_like(p)
                p.grad.view(-1)[largest] = total.view(-1)[largest]
                residuals[p] = total - p.grad

    optimizer.register_step_pre_hook(replace)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compression_leaves_it_alone(compression, ranks, use):
    def prepare_plainly(net):
        optimizer = make("SGD", net)
        if compression == "top-k":
            keep_largest(optimizer)
        return optimizer, None

    engine, net = ht.engines.AllReduce(**COMPRESSIONS[compression]), make_net(USES[use])
    expected = train_plainly(prepare_plainly, net=net, samples=EQUAL)
    result = train(lambda net: (make("SGD", net), None), ranks, engine, net=net, samples=EQUAL)
    assert difference(result, expected) <= LIMIT


APART = ["local-sgd", "ps-async", "easgd", "gossip", ht.engines.PsSync(servers=2)]


@pytest.mark.parametrize("engine", APART, ids=["local-sgd", "ps-async", "easgd", "gossip", "2"])
def test_other_engines_leave_it_alone(engine):
    def prepare(net):
        return optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1), None

    (first, *_) = train(prepare, 4 if engine is APART[-1] else 3, engine, steps=STEPS)
    assert np.array_equal(first[IS_HEAD], values(INITIAL)[IS_HEAD])
    assert not np.allclose(first[~IS_HEAD], values(INITIAL)[~IS_HEAD])


def test_frozen_parameters_may_be_held_by_the_optimizer():
    def prepare(net):
        net.first.requires_grad_(False)
        return make("SGD", net), None

    expected = train_plainly(prepare)
    assert difference(train(prepare, 2), expected) <= LIMIT
    strangers = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(UsageError, match="seen 1 of others"):
        train(lambda net: (optim.SGD([*net.parameters(), *strangers], lr=0.1), None), 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_absent_ranges_are_those_of_negative_zeros_alone(dtype):
    grad = np.full(200_000, -0.0, dtype)
    grad[10:20] = 0.0
    grad[[29, 199_999]] = 1e-30
    stops = (0, 10, 20, 30, 150_000, 200_000)
    ranges = [slice(*pair) for pair in pairwise(stops)]
    assert Ranges(ranges).find_absent(grad) == [0, 3]
    assert Ranges([]).find_absent(grad) == []
    assert SAMPLES % 6 == 0  # so that blocks and ranks have equal shares
