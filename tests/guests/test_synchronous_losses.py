"""Ranks are lost while parameters change that `ht.torch.sync` follows: those left stay equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guests.test_lost_ranks import NEVER, call_at
from guests.test_synchronous import (  # noqa: F401  (a fixture)
    CASES,
    STEPS,
    WIRES,
    make_net,
    one_thread,
    share_of,
)

from hpctrain.torch.gradient_sync.synchronous import GradientSync
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.either
CHANGES = ["in turns", "others alone", "added group", "recomputed", "a head of one rank"]


def run_loop(name, wire, kills, calls=None):
    case = CASES[name]

    def body(link):
        world, net = over_threads(link), make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        with GradientSync(world, net, optimizer, WIRES[wire]):
            before = link.hub.job.calls[link.rank]
            for step in range(STEPS):
                case.change(step, net, optimizer)
                optimizer.zero_grad()
                x, y = share_of(step, world.rank, world.size)
                output = net(x.requires_grad_(), case.head(step, world.rank))
                torch.nn.functional.cross_entropy(output, y).backward()
                optimizer.step()
            if calls is not None:
                calls.append((before, link.hub.job.calls[link.rank]))
        return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()

    return [result for result in run_ranks(3, body, 20.0, kills) if result is not None]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", CHANGES)
def test_ranks_that_are_left_stay_equal(name, wire):
    calls: list = []
    run_loop(name, wire, NEVER, calls)
    counts = []
    for part in np.linspace(0.05, 0.95, 8):
        first, *rest = run_loop(name, wire, {1: call_at(part, calls)})
        assert all(np.array_equal(first, parameters) for parameters in rest)
        counts.append(1 + len(rest))
    assert counts.count(2) >= 4
