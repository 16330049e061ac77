"""Losses of ranks in a training that goes on: when, which ranks, and the time without progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Recovery:
    """A loss of ranks that training survived."""

    step: int  #: from which training went on
    wall_s: float  #: of the last step completed before the loss, since the start of the run's part
    ranks: list[int]  #: the lost ranks, by their numbers in the job
    hosts: list[str]  #: the host of each lost rank
    spares: list[int]  #: that took their places
    steps_redone: int  #: completed before, and done again from a copy of the state
    lost_s: float | None = None  #: until the next step completed, or the end; None before that


@dataclass
class Recoveries:
    """The rank losses of a call of fit, the same on each surviving rank."""

    _began_at: float | None = None  #: Unix time of the first step of this call
    since_step: int = 0
    last_step: int = 0  #: completed
    _last_step_at: float = 0.0  #: its Unix time
    entries: list[Recovery] = field(default_factory=list)
    row_ranks: list[int] = field(default_factory=list)  #: lost since the last row
    has_lost_host: bool = False  #: since the last checkpoint: MPI's launcher may end the job

    @property
    def has_begun(self) -> bool:
        """Whether a part of the call has begun to train."""
        return self._began_at is not None

    def begin(self, step: int) -> float:
        """Return the seconds since the first step of this call, `step` if it begins now."""
        now = time.time()
        if self._began_at is None:
            self._began_at = self._last_step_at = now
            self.since_step = self.last_step = step
        return now - self._began_at

    def count_step(self, step: int) -> None:
        """Note that `step` is complete."""
        if step > self.last_step:
            self.end_loss()
            self.last_step, self._last_step_at = step, time.time()

    def end_loss(self) -> None:
        """Note that the time without progress since a loss is over, or that training is."""
        if self.entries and self.entries[-1].lost_s is None:
            self.entries[-1].lost_s = time.time() - self._last_step_at

    def add(
        self, step: int, ranks: Sequence[int], hosts: Sequence[str], spares: Sequence[int]
    ) -> None:
        """Add a loss of `ranks`, after which training goes on from `step`."""
        if self._began_at is None:
            return
        if self.entries and self.entries[-1].lost_s is None:  # another loss before any step
            last_loss = self.entries[-1]
            ranks, hosts, spares = (
                [*last_loss.ranks, *ranks], [*last_loss.hosts, *hosts], [*last_loss.spares, *spares]
            )  # fmt: skip
            self.entries.pop()
        wall_s, steps_redone = self._last_step_at - self._began_at, max(self.last_step - step, 0)
        recovery = Recovery(step, wall_s, list(ranks), list(hosts), list(spares), steps_redone)
        self.entries.append(recovery)
        self.row_ranks += [rank for rank in ranks if rank not in self.row_ranks]

    @property
    def lost_ranks(self) -> list[int]:
        """All ranks lost so far."""
        return [rank for entry in self.entries for rank in entry.ranks]

    @property
    def spares(self) -> list[int]:
        """All spares that have taken a place."""
        return [rank for entry in self.entries for rank in entry.spares]

    def summary(self, wall_s: float) -> dict[str, Any]:
        """Return the entries of summary.json; ETTR: the part of `wall_s` with progress."""
        lost_s = sum(entry.lost_s or 0.0 for entry in self.entries)
        return {
            "recoveries": [asdict(entry) for entry in self.entries],
            "lost_s": lost_s,
            "ettr": 1 - lost_s / max(wall_s, lost_s, 1e-9),
            "spares_used": len(self.spares),
        }

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> Recoveries:
        """Return the record whose `asdict` is `table`."""
        entries = [Recovery(**entry) for entry in table["entries"]]
        return cls(**{**table, "entries": entries})
