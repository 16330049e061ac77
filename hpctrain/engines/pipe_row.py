"""A row of a mesh: the ranks that together hold one replica act as one worker.

    pipe rank         0                       1                       2
    gradient          of its layers           of its layers           of its layers
    join              <------ the maxima of flags and failures over the ranks -------->
    report            to the coordinator
    reply             from the coordinator -> from rank 0 ----------> from rank 0
    push, pull        with pipe rank 0 of     with pipe rank 1 of     with pipe rank 2 of
                      the other rows          the other rows          the other rows

What depends on the order of arrival is decided once, on pipe rank 0, and passed along the row: two
decisions could differ, and the layers of a replica would come from different models. Without a mesh
each rank is a row of its own, and nothing is exchanged.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives import broadcast
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.engines.engine import Flags, Times
from hpctrain.world import World


class PipeRow:
    """This rank's row, for the main thread."""

    def __init__(self, world: World, times: Times):
        """`world` has the ranks with the same layers; waits are added to `times`."""
        self.rank = world.voters.link.rank  #: the rank that a failure names
        self._grid, self._trace, self._times = world.grid, world.trace, times

    @property
    def is_first(self) -> bool:
        """Whether this rank decides for its row, and reports for it."""
        return self._grid is None or self._grid.pipe.link.rank == 0

    def join(self, flags: Flags) -> Flags:
        """Return the maxima of the flags over the row; collective."""
        if self._grid is None:
            return flags
        with self._times.wait(self._trace, "wait for flags"):
            return Flags(*elementwise_maximum(self._grid.pipe, flags))

    def join_check(self, is_finite: bool, flags: Flags = Flags()) -> Flags:  # noqa: B008  (immutable)
        """Return the joined `flags`, with a failure unless all ranks pass `is_finite`."""
        return self.join(flags if is_finite else flags.with_failure(self.rank))

    def share(self, numbers: np.ndarray) -> np.ndarray:
        """Return `numbers` of the first rank on all ranks of the row; collective."""
        if self._grid is not None:
            broadcast(self._grid.pipe, numbers)
        return numbers
