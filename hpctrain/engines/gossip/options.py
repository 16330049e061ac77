"""Options of gossip: workers average with each other along one of three graphs, without servers.

`bipartite`: random pairs, no barrier (ad_psgd.py). `ring` and `exponential`: all
workers take each step together, and each averages with its neighbours (d_psgd.py). The mean
over the workers' parameters is evaluated and saved.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.engines.gossip.ad_psgd import AdPsgdEngine
from hpctrain.engines.gossip.d_psgd import DPsgdEngine
from hpctrain.engines.options import EngineOptions
from hpctrain.gradients.replica import Replica
from hpctrain.optim import Optimizer
from hpctrain.world import World


@config.options
class Gossip(EngineOptions):
    """`[engine] kind = "gossip"`."""

    graph: Literal["bipartite", "ring", "exponential"] = "bipartite"

    def must_fit(self, workers: int) -> None:
        """Raise UsageError for a single worker, which has no partner."""
        if workers < 2:
            raise UsageError(
                "engine 'gossip' needs at least 2 workers, which average with each other, but 1 "
                "rank was started; start more, or choose --engine single"
            )

    def build(
        self, world: World, replica: Replica, optimizer: Optimizer
    ) -> AdPsgdEngine | DPsgdEngine:
        """Return this rank's engine; collective."""
        self.must_fit(world.size)
        if self.graph != "bipartite":
            return DPsgdEngine(world, replica, optimizer, self.graph)
        if not world.concurrent:
            raise UsageError(
                '[engine] graph = "bipartite" needs an MPI with THREAD_MULTIPLE, and this one '
                'grants less; set graph = "exponential"'
            )
        return AdPsgdEngine(world, replica, optimizer)
