"""The interface of the options of all regimes, beside `build`, which returns an engine."""

from __future__ import annotations

from hpctrain.collectives.ordered import SumTree


class EngineOptions:
    """Options of a regime; most regimes keep these answers."""

    algorithm = "auto"  #: of the all-reduce of gradients

    def workers(self, ranks: int) -> int:
        """Return the number of workers among `ranks`; raise UsageError if the ranks do not fit."""
        self.must_fit(ranks)
        return ranks

    def must_fit(self, workers: int) -> None:
        """Raise UsageError if the options do not fit `workers` workers."""

    def tree(self, ranks: int) -> SumTree | None:
        """Return the tree of ordered sums over `ranks`; None for fast sums."""
        return None

    def updates_per_step(self, workers: int) -> float:
        """Return the number of the optimizer's updates while `workers` do a step each."""
        return 1.0
