"""The mesh: the ranks of a job along a data axis and a pipe axis.

Eight ranks with `pipe = 4`. The ranks of a row together hold one replica, the ranks of a column
hold the same layers, of different replicas:

              pipe 0   pipe 1   pipe 2   pipe 3
    data 0    rank 0   rank 1   rank 2   rank 3      activations and their gradients travel
    data 1    rank 4   rank 5   rank 6   rank 7      in a row, sums of gradients in a column

The ranks of a node are neighbours along the pipe axis, whatever the order in which the launcher
placed them: activations wait for nobody, sums of gradients overlap with backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpctrain.parallel.options import MeshOptions
from hpctrain.world import World
from hpctrain.world.grid import Grid

if TYPE_CHECKING:
    from hpctrain.parallel.pipeline.replica import PipelineReplica


@dataclass(frozen=True)
class Mesh:
    """A rank's Worlds: all ranks, and the ranks along each axis."""

    everyone: World
    data: World  #: the ranks with the same layers; engines train on it
    pipe: World  #: the ranks that hold one replica, in the order of the pipe axis
    pipeline: PipelineReplica | None = None  #: this rank's part of a replica

    @property
    def grid(self) -> Grid:
        """The groups and links of this rank along the pipe axis."""
        assert self.data.grid is not None
        return self.data.grid

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its row, which decides on the order of events."""
        return self.data.grid is None or self.grid.pipe.link.rank == 0


def make_mesh(world: World, options: MeshOptions) -> Mesh:
    """Return this rank's mesh; collective. Raises UsageError if the ranks do not fit."""
    options.workers(world.size)
    hosts = list(dict.fromkeys(world.hosts))
    by_host = sorted(range(world.size), key=lambda rank: (hosts.index(world.hosts[rank]), rank))
    data_index, pipe_index = divmod(by_host.index(world.rank), options.pipe)
    pipe = world.split(data_index, pipe_index)
    data = world.split(pipe_index, data_index)
    grid = Grid(pipe.main, pipe.threads.link_for("stages"), pipe.threads.link_for("norms"))
    trace = world.trace  # the engine's spans belong to the trace of the run
    data = replace(data, grid=grid, voters=world.main, trace=trace)
    return Mesh(world, data, replace(pipe, trace=trace))
