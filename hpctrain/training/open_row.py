"""The row of metrics that is not due yet: the sums of its steps so far."""

from __future__ import annotations

from typing import Any

from hpctrain.nn import Sums, Total, add


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
