"""Modules of PyTorch under the Trainer equal plain PyTorch in one process, in float64."""

from __future__ import annotations

import pytest
import torch
from guests.plain import FEATURES, difference, make_samples, train_on, train_plain
from torch import nn

import hpctrain as ht

pytestmark = pytest.mark.either

LIMIT = 1e-12
ENGINES = {
    "allreduce": "allreduce",
    "ps-sync": ht.engines.PsSync(placement="colocated"),
}


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_without_samples_of_the_last_batch(engine, ranks):
    """10 samples in batches of 8: the second batch has 2."""
    data, module = make_samples(samples=10), make_mlp()
    plain = train_plain(module, data)
    for trained in train_on(ranks, module, data, ENGINES[engine], precision="float64"):
        assert difference(plain, trained) <= LIMIT
