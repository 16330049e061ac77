"""Engines that are closed free their links: the communicators of MPI are limited in number."""

from __future__ import annotations

import pytest
from ranks import run_on
from regimes import REGIMES

from hpctrain import nn, optim
from hpctrain.training.trainer import Trainer
from hpctrain.transport.threads.waits import LocalWaits


@pytest.mark.parametrize("regime", REGIMES)
def test_a_closed_engine_has_freed_the_links_that_it_made(regime, monkeypatch):
    freed: list[LocalWaits] = []
    monkeypatch.setattr(LocalWaits, "free", lambda waits: freed.append(waits))

    def body(world):
        before = set(world.threads.links)
        model = nn.Model({"out": nn.Linear(3)}, (4,))
        Trainer(model, optim.sgd(0.1), REGIMES[regime], world=world).close()
        made = [world.threads.links[purpose] for purpose in world.threads.links.keys() - before]
        assert [link for links in made for link in links if link.endpoint.waits not in freed] == []

    run_on("threads", 1 if regime == "single" else 4, body)
