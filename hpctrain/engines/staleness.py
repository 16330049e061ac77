"""Staleness of gradients, measured on the rank that applies them.

The *staleness* of a gradient is the number of updates between the pull of the parameters at which
it was computed and its push. The *clock gap* is the number of steps by which a worker that starts a
step is ahead of the slowest one. Source of both terms: Ho et al. (2013).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.collectives.tree import broadcast_first
from hpctrain.transport.link import Link


@dataclass
class Staleness:
    """The stale and the dropped gradients of an engine since its start."""

    histogram: Counter[int] = field(default_factory=Counter)  #: staleness -> applied gradients
    clock_gap_max: int | None = None  #: None where no worker can be ahead
    dropped: int = 0  #: gradients that arrived too late to be applied

    def record_gradient(self, staleness: int) -> None:
        """Record an applied gradient."""
        self.histogram[staleness] += 1

    def record_gap(self, steps: int) -> None:
        """Record a worker that starts a step `steps` ahead of the slowest."""
        self.clock_gap_max = max(self.clock_gap_max or 0, steps)

    @property
    def mean(self) -> float | None:
        """The mean over gradients; None if no gradient was applied on its own."""
        gradient_count = self.histogram.total()
        total = sum(staleness * count for staleness, count in self.histogram.items())
        return total / gradient_count if gradient_count else None

    @property
    def max(self) -> int | None:
        """The largest staleness; None if no gradient was applied on its own."""
        return max(self.histogram, default=None)

    def merge(self, other: Staleness) -> Staleness:
        """Return the counts of two parts of a run, or of two servers, added up."""
        gaps = [gap for gap in (self.clock_gap_max, other.clock_gap_max) if gap is not None]
        return Staleness(
            self.histogram + other.histogram,
            max(gaps, default=None),
            self.dropped + other.dropped,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object for `from_json`."""
        return {
            "histogram": {str(key): count for key, count in sorted(self.histogram.items())},
            "clock_gap_max": self.clock_gap_max,
            "dropped": self.dropped,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Staleness:
        """Return the counts of an object from `to_json`."""
        histogram = Counter({int(key): count for key, count in data["histogram"].items()})
        return cls(histogram, data["clock_gap_max"], data["dropped"])


def broadcast_staleness(link: Link, local_counts: Staleness | None) -> Staleness:
    """Return on all ranks the counts of the only rank that passes `local_counts`; collective."""
    message = None if local_counts is None else json.dumps(local_counts.to_json()).encode()
    return Staleness.from_json(*map(json.loads, broadcast_first(link, message, limit=1).values()))


def metrics(staleness: Staleness | None) -> dict[str, Any]:
    """Return the entries of rows and summaries; None for counts that a regime lacks."""
    if staleness is None:
        return dict.fromkeys(metrics(Staleness()))
    return {
        "staleness_mean": staleness.mean,
        "staleness_max": staleness.max,
        "staleness_histogram": staleness.to_json()["histogram"] or None,
        "clock_gap_max": staleness.clock_gap_max,
        "dropped_gradients": staleness.dropped,
    }
