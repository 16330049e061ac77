"""The base class of engines for several ranks: what does not depend on the regime."""

from __future__ import annotations

import hashlib

import numpy as np

from hpctrain.collectives import Group, broadcast
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.collectives.small_messages import equal_rows
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.core.xp import to_host
from hpctrain.engines.engine import Engine, Flags, Task, Times, sum_over
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums
from hpctrain.transport.link import Link
from hpctrain.world import World


class EngineBase(Engine):
    """Implements `Engine` except training, checkpoints and the gradient check."""

    worker: int | None

    def __init__(self, world: World, replica: Replica, settings: str):
        """Broadcast the parameters and buffers of rank `world.source`; collective.

        Raises an error on all ranks if `settings` or the layout of the model differ between them.
        """
        arena = replica.arena
        layout_text = f"{settings}, {arena.param.dtype}, {arena.slots}, {arena.buffer_slots}"
        world.must_agree(layout_text, "model and options")
        if world.source is not None:  # models of users may start from other random numbers
            for plane in (arena.param, arena.buffer):
                broadcast(world.main, plane, world.source)
        self.replica, self.times = replica, Times()
        self.workers, self.worker = world.size, world.rank
        self._world, self._trace, self._group = world, world.trace, world.main
        self._row = PipeRow(world, self.times)
        self._links: list[Link] = []  # links that only this engine uses

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the start."""
        pipe_bytes = self._world.grid.bytes_sent if self._world.grid else 0
        links = [*self._group.links, *self._links]
        return sum(link.endpoint.traffic.bytes_sent for link in links) + pipe_bytes

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of a few float64 over all ranks, the same on each."""
        return sum_over(self._group, numbers)

    def settle(self) -> None:
        """Share the buffers; after `train` the arena holds the parameters to evaluate and save."""
        self._share_buffers(self._group)

    def _share_buffers(self, group: Group) -> None:
        """Replace buffers that differ between ranks by the mean over ranks; collective.

        Those that are equal on all ranks keep their bytes.
        """
        arena = self.replica.arena
        if not self.check.buffers_may_differ or not arena.buffer.size or group.link.size == 1:
            return
        self.check.buffers_may_differ = False
        views = list(arena.views(arena.buffer).values())
        hashes = b"".join(hashlib.sha256(to_host(x).data).digest() for x in views)
        are_equal = equal_rows(group.link, np.frombuffer(hashes, np.uint64).reshape(len(views), 4))
        for i in np.flatnonzero(~are_equal):
            flat = views[i].reshape(-1)
            recursive_doubling(group, flat, np.add)
            flat /= group.link.size

    def close(self) -> None:
        """Free the links; collective."""
        for link in reversed(self._links):
            link.endpoint.free()

    def _compute_gradient(self, task: Task) -> tuple[Sums, bool]:
        """Compute a gradient; return (sums, whether it is finite on all ranks of the row)."""
        with self.times.compute(self._trace, "forward, backward"):
            sums = self.replica.gradient(*task, self.check.begin(ignore_ready))
            is_finite = self.check.passes(sums)
        return sums, not self._row.join_check(is_finite).failed


class PipeRow:
    """This rank's row, for the main thread.

        pipe rank         0                       1                       2
        gradient          of its layers           of its layers           of its layers
        join              <------ the maxima of flags and failures over the ranks -------->
        report            to the coordinator
        reply             from the coordinator -> from rank 0 ----------> from rank 0
        push, pull        with pipe rank 0 of     with pipe rank 1 of     with pipe rank 2 of
                          the other rows          the other rows          the other rows

    What depends on the order of arrival is decided once, on pipe rank 0, and passed along the row:
    two decisions could differ, and the layers of a replica would come from different models.
    Without a mesh each rank is a row of its own, and nothing is exchanged.
    """

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

    def join_check(self, is_finite: bool, flags: Flags = Flags()) -> Flags:  # noqa: B008 (immutable)
        """Return the joined `flags`, with a failure unless all ranks pass `is_finite`."""
        return self.join(flags if is_finite else flags.with_failure(self.rank))

    def share(self, numbers: np.ndarray) -> np.ndarray:
        """Return `numbers` of the first rank on all ranks of the row; collective."""
        if self._grid is not None:
            broadcast(self._grid.pipe, numbers)
        return numbers
