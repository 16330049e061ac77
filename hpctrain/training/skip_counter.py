"""Counts of the skipped steps and dropped gradients of a run, and their limit."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpctrain.core.errors import TrainingError
from hpctrain.engines import Engine
from hpctrain.engines.staleness import Staleness
from hpctrain.world import World

log = logging.getLogger(__name__)


class SkipCounter:
    """Steps skipped and gradients dropped since the first step, also before a resume."""

    def __init__(self, world: World, engine: Engine):
        self._world, self._engine, self._check = world, engine, engine.check
        self.skipped_steps = self.in_a_row = 0
        self._dropped_before_resume = self._dropped_at_begin = 0

    def resume(self, about: Mapping[str, Any]) -> None:
        """Go on with the counts of a checkpoint, see `state`."""
        self.skipped_steps = about.get("skipped_steps", 0)
        self.in_a_row = about.get("skipped_in_a_row", 0)
        self._dropped_before_resume = about.get("dropped_not_finite", 0)

    def begin(self) -> None:
        """Count gradients dropped from now on: an engine may train more than once."""
        self._dropped_at_begin = self._check.dropped

    def state(self, ranks: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Return the counts for a checkpoint; `ranks`: every rank's counts, see `rank_counts`."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.in_a_row,
            "dropped_not_finite": self._dropped(ranks),
        }

    def rank_counts(self) -> dict[str, float]:
        """Return this rank's counts for `dropped_gradients` and `state`.

        The rank with the first slot counts for the ranks that hold a replica together.
        """
        counts = self._engine.replica.arena.has_first_slot
        dropped = self._check.dropped - self._dropped_at_begin if counts else 0
        return {"dropped": dropped, "own_steps": self._check.has_own_steps}

    def dropped_gradients(
        self, ranks: Mapping[str, np.ndarray], staleness: Staleness | None
    ) -> int | None:
        """Return the number of dropped gradients, late ones too; None if the regime drops none."""
        late_gradients = staleness.dropped if staleness else None
        if late_gradients is None and not ranks["own_steps"].any():
            return None
        return (late_gradients or 0) + self._dropped(ranks)

    def skip(self, step: int, rank: int, limit: int) -> None:
        """Count a step that all ranks skip; raise TrainingError after `limit` in a row.

        `rank`: the source of a gradient that is not finite; the number of ranks stands for
        all ranks together. Collective.
        """
        size, check = self._world.size, self._check
        texts = self._world.gather(json.dumps([check.fault, check.has_own_steps]))
        fault, own_steps = json.loads(texts[rank % size])
        place = f"rank {rank} ({self._world.hosts[rank]})" if rank < size else "all ranks"
        text = f"{fault} at step {step} on {place}"
        if own_steps or self.in_a_row >= limit:
            advice = _advice(limit, "gradient" if own_steps else "step")
            raise TrainingError(f"{text}; no rank has taken its gradient. {advice}")
        if self._world.rank == 0 and not self.skipped_steps:
            log.warning("%s; the step is skipped. Rows of metrics count skipped_steps", text)
        self.skipped_steps += 1
        self.in_a_row += 1

    def _dropped(self, ranks: Mapping[str, np.ndarray]) -> int:
        return self._dropped_before_resume + int(ranks["dropped"].sum())


def _advice(limit: int, subject: str) -> str:
    advice = "Lower the rate or lengthen the warm-up"
    if not limit:
        return f"{advice}, or set [run] not_finite = 'skip'"
    return f"The limit is {limit} skipped {subject}{'s' * (limit > 1)} in a row. {advice}"
