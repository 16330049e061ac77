"""`ht.torch.sync` beside plain PyTorch in one process, float64: gradients of each step, parameters.

Ranks are threads. One process adds up the losses of all ranks, divided by their number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain.gradients.reducer import WireOptions
from hpctrain.torch.gradient_sync.synchronous import GradientSync
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.either
STEPS, BATCH, LIMIT = 10, 12, 1e-12
_lock = threading.Lock()  # of PyTorch's generator, which all ranks of the process share


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Net(nn.Module):
    """A backbone, two heads, and weights that are tied across two blocks."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.recomputes = False

    def forward(self, x, head=0):
        x = self.first(x).tanh()
        for block in (self.second, self.third):
            x = checkpoint(block, x, use_reentrant=True) if self.recomputes else block(x)
        return self.heads[head](x)


def make_net(kind=Net):
    with _lock:
        torch.manual_seed(0)
        return kind().double()


def use_head(step, rank):
    return 0


@dataclass(frozen=True)
class Case:
    """A loop: what its user does before each step."""

    change: Callable = lambda step, net, optimizer: None
    head: Callable = use_head  #: the head that a rank uses in a step
    zeroes: Callable = lambda step: True  #: whether gradients are reset before a step
    to_none: bool = True
    late: bool = False


def freeze(net, value=False):
    for p in net.parameters():
        p.requires_grad_(value)


def thaw_at_3(step, net, optimizer):
    if step in (0, 3):
        net.first.requires_grad_(step == 3)
        net.second.bias.requires_grad_(step == 3)


def swap(step, net, optimizer):
    """Freeze all, but for the first layer alone at step 4, and the head alone at step 7."""
    if step in (4, 7):
        freeze(net)
        (net.first if step == 4 else net.heads[0]).requires_grad_(True)


def freeze_for_good(step, net, optimizer):
    if step == 1:
        net.first.requires_grad_(False)


def take_turns(step, net, optimizer):
    net.first.requires_grad_(step % 2 == 0)
    net.third.bias.requires_grad_(step % 2 == 1)


def add_group(step, net, optimizer):
    if step == 0:
        optimizer.param_groups[0]["params"] = [*net.first.parameters(), *net.second.parameters()]
    if step == 4:
        optimizer.add_param_group({"params": list(net.heads[0].parameters()), "lr": 0.02})


def replace(step, net, optimizer):
    if step == 5:
        with _lock:
            torch.manual_seed(step)
            net.heads[0] = nn.Linear(8, 3).double()
        optimizer.add_param_group({"params": list(net.heads[0].parameters())})


def recompute(step, net, optimizer):
    net.recomputes = True


CASES = {
    "plain": Case(),
    "frozen, then trained": Case(thaw_at_3),
    "trained, then frozen": Case(lambda step, *rest: thaw_at_3({0: 3, 6: 0}.get(step), *rest)),
    "others alone": Case(swap),
    "frozen for good": Case(freeze_for_good),
    "in turns": Case(take_turns),
    "added group": Case(add_group),
    "replaced layer": Case(replace),
    "heads in turns": Case(head=lambda step, rank: step // 2 % 3),
    "a head of one rank": Case(head=lambda step, rank: 2 * (rank > 0 and step % 2)),
    "gradients left": Case(zeroes=lambda step: step % 3 == 0),
    "gradients left, heads": Case(
        zeroes=lambda step: step % 3 == 0, head=lambda step, rank: (step + rank) % 2
    ),
    "zeros": Case(to_none=False, head=lambda step, rank: step % 2),
    "recomputed": Case(recompute),
    "recomputed, left": Case(recompute, zeroes=lambda step: step % 3 == 0),
}
WIRES = {
    "after backward": WireOptions(),
    "buckets in a thread": WireOptions(algorithm="ring", overlap="always", bucket_bytes=64),
}


def share_of(step, rank, size):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (BATCH,), generator=generator)
    return x[rank::size], y[rank::size]


def train(case, net, ranks, size, before_step=lambda: None):
    """Return the gradients of each step and the parameters; `ranks`: whose losses are summed."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    synced = before_step(net, optimizer)
    gradients = []
    for step in range(STEPS):
        case.change(step, net, optimizer)
        if case.zeroes(step):
            optimizer.zero_grad(set_to_none=case.to_none)
        for rank in ranks:
            x, y = share_of(step, rank, size)
            loss = nn.functional.cross_entropy(net(x.requires_grad_(), case.head(step, rank)), y)
            (loss / len(ranks)).backward()
        gradients.append({n: None if p.grad is None else p.grad.clone()
                          for n, p in net.named_parameters()})  # fmt: skip
        optimizer.step()
    if synced is not None:
        synced.close()
    return gradients, dict(net.named_parameters())


def train_synced(case, size, wire):
    def body(link):
        def start(net, optimizer):
            if link.rank > 0:
                for p in net.parameters():
                    p.data.zero_()  # rank 0 broadcasts its own
            return GradientSync(over_threads(link), net, optimizer, wire)

        return train(case, make_net(), [link.rank], size, start)

    return run_ranks(size, body, 20.0)


def difference(expected, observed):
    """Return the largest difference, relative to the largest value; infinite if one is None."""
    assert expected.keys() == observed.keys()
    largest = 0.0
    for name, x in expected.items():
        y = observed[name]
        if x is None or y is None:
            largest = max(largest, 0.0 if x is y else float("inf"))
        else:
            largest = max(largest, ((x - y).abs().max() / (x.abs().max() + 1e-30)).item())
    return largest


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", CASES)
def test_loops_end_as_in_one_process(name, wire, size):
    case = CASES[name]
    expected = train(case, make_net(), range(size), size, lambda *_: None)
    for gradients, parameters in train_synced(case, size, WIRES[wire]):
        steps = [difference(*pair) for pair in zip(expected[0], gradients, strict=True)]
        assert max(steps) <= LIMIT, steps
        assert difference(expected[1], parameters) <= LIMIT
