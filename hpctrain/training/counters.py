"""Counters of a run: its times and bytes, its skipped steps, the sums of the row not due yet."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np

from hpctrain.collectives.tree import broadcast_bytes
from hpctrain.core.errors import TrainingError
from hpctrain.engines import Engine
from hpctrain.engines.staleness import Staleness
from hpctrain.nn import Sums, Total, add
from hpctrain.world import World


class RunTimes:
    """Times since the start of the clocks, over all engines that a call of fit has had."""

    def __init__(self, engine: Engine, earlier: RunTimes | None = None):
        """`earlier`: times of the engine before a rank loss."""
        self._engine = engine
        self._earlier_s = earlier.of_engine() if earlier else {}
        self._earlier_bytes = earlier.bytes_sent if earlier else 0
        self.begin()

    def begin(self, elapsed_s: float = 0.0) -> None:
        """Start the clocks, `elapsed_s` before now; engines may train repeatedly."""
        self._start_s = perf_counter() - elapsed_s
        self._offsets_s = {
            name: s - self._earlier_s.get(name, 0.0) for name, s in vars(self._engine.times).items()
        }

    @property
    def wall_s(self) -> float:
        """Seconds since the start."""
        return perf_counter() - self._start_s

    def of_engine(self) -> dict[str, float]:
        """Return the seconds of each activity of this rank, see `engines.engine.Times`."""
        return {name: s - self._offsets_s[name] for name, s in vars(self._engine.times).items()}

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent."""
        return self._earlier_bytes + self._engine.bytes_sent


class OpenRow:
    """The steps since the last row, with the sums of this rank or of all workers."""

    def __init__(self) -> None:
        self.sums, self.since_step = Sums(), 0
        self.since_s = 0.0  #: the wall time of the last row

    def add(self, sums: Sums) -> None:
        """Add the sums of a step."""
        self.sums = add(self.sums, sums)

    def has_steps(self, step: int) -> bool:
        """Return whether steps before `step` are in no row yet."""
        return self.since_step < step

    def close(self, step: int, wall_s: float = 0.0) -> None:
        """Begin the next row after `step`."""
        self.sums, self.since_step, self.since_s = Sums(), step, wall_s

    def to_json(self, step: int, sums: Sums) -> dict[str, Any] | None:
        """Return the row at `step` for a checkpoint, with each rank's `sums`; None without sums."""
        return {"since_step": self.since_step, "sums": sums} if self.has_steps(step) else None

    def restore(self, table: dict[str, Any] | None, step: int, *, with_sums: bool) -> None:
        """Go on with the row in a checkpoint of `step`, on one rank `with_sums`."""
        table = table or {"since_step": step, "sums": {}}
        self.since_step = table["since_step"]
        if with_sums:
            self.sums = {name: Total(*total) for name, total in table["sums"].items()}


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
            "dropped_not_finite": self._dropped_count(ranks),
        }

    def rank_counts(self) -> dict[str, float]:
        """Return this rank's counts for `dropped_gradients` and `state`.

        The rank with the first slot counts for the ranks that hold a replica together.
        """
        counts_gradients = self._engine.replica.arena.has_first_slot
        dropped = self._check.dropped - self._dropped_at_begin if counts_gradients else 0
        return {"dropped": dropped, "own_steps": self._check.has_own_steps}

    def dropped_gradients(
        self, ranks: Mapping[str, np.ndarray], staleness: Staleness | None
    ) -> int | None:
        """Return the number of dropped gradients, late ones too; None if the regime drops none."""
        late_gradients = staleness.dropped if staleness else None
        if late_gradients is None and not ranks["own_steps"].any():
            return None
        return (late_gradients or 0) + self._dropped_count(ranks)

    def skip(self, step: int, rank: int, limit: int) -> None:
        """Count a step that all ranks skip; raise TrainingError after `limit` in a row.

        `rank`: the source of a gradient that is not finite; the number of ranks stands for
        all ranks together. Collective.
        """
        size, check = self._world.size, self._check
        own_check = json.dumps([check.fault, check.has_own_steps]).encode()
        fault, own_steps = json.loads(broadcast_bytes(self._world.link, own_check, rank % size))
        rank_text = f"rank {rank} ({self._world.hosts[rank]})" if rank < size else "all ranks"
        fault_text = f"{fault} at step {step} on {rank_text}"
        if own_steps or self.in_a_row >= limit:
            advice = _advice(limit, "gradient" if own_steps else "step")
            raise TrainingError(f"{fault_text}; no rank has taken its gradient. {advice}")
        if self._world.rank == 0 and not self.skipped_steps:
            log.warning("%s; the step is skipped. Rows of metrics count skipped_steps", fault_text)
        self.skipped_steps += 1
        self.in_a_row += 1

    def _dropped_count(self, ranks: Mapping[str, np.ndarray]) -> int:
        return self._dropped_before_resume + int(ranks["dropped"].sum())


def _advice(limit: int, subject: str) -> str:
    advice = "Lower the rate or lengthen the warm-up"
    if not limit:
        return f"{advice}, or set [run] not_finite = 'skip'"
    return f"The limit is {limit} skipped {subject}{'s' * (limit > 1)} in a row. {advice}"
