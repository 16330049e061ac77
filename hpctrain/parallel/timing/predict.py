"""Predicted steps of a grid of data x pipe ranks, from a pipeline's clock and LogGP rings.

    pipeline d:   rank dP    dP + 1  ...  dP + P - 1      neighbours in rank, so often in a node
    ring r:       rank r  -> P + r -> 2P + r -> ...       the gradients of the stages of rank r

All pipelines are alike: a single pipeline is replayed, whatever the number of ranks. Assumed:

- the ring of a rank begins after the last action of its list, and overlaps with nothing of its own;
- rings do not delay messages of pipelines that still run;
- in a ring all ranks begin at once; the ranks of a node that send to other nodes share its cards;
- gradients are reduced once per step; the update takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.timing.clock import StageCosts, run_clock
from hpctrain.tuning.model.loggp import Clocks, Cluster, Wire
from hpctrain.tuning.model.message_schedules import ring


@dataclass(frozen=True)
class Grid:
    """A cluster with `data` pipelines; the ranks of a pipeline follow each other."""

    cluster: Cluster
    data: int
    ranks_per_node: int = 1


@dataclass(frozen=True)
class GridStep:
    """Seconds of a step on a grid; `compute` is the mean over the ranks of a pipeline."""

    ranks: int
    step: float
    pipeline: float  #: until the last backward
    compute: float

    @property
    def efficiency(self) -> float:
        """The share of the step in which ranks compute."""
        return self.compute / self.step


def predict_step(
    schedule: PipelineSchedule,
    costs: StageCosts,
    grid: Grid,
    boundary_bytes: Sequence[int] | int,
    gradient_bytes: Sequence[int],
) -> GridStep:
    """Return the step of `grid.data` pipelines; `gradient_bytes` has an entry per stage."""
    large, small = sorted((schedule.ranks, grid.ranks_per_node), reverse=True)
    if large % small:
        raise UsageError(
            f"{schedule.name}: expected whole pipelines in a node, or whole nodes in a pipeline, "
            f"seen {schedule.ranks} ranks and {grid.ranks_per_node} per node; take "
            f"{large // small * small} in place of {large}"
        )
    if len(gradient_bytes) != schedule.stages:
        raise UsageError(
            f"{schedule.name}: expected the gradient bytes of {schedule.stages} stages, seen "
            f"{len(gradient_bytes)}"
        )

    def wires(sender: int, receiver: int) -> Wire:
        same_node = sender // grid.ranks_per_node == receiver // grid.ranks_per_node
        return grid.cluster.inside if same_node else grid.cluster.between

    timeline = run_clock(schedule, costs, wires, boundary_bytes)
    nbytes = [sum(gradient_bytes[s] for s in schedule.stages_of(r)) for r in range(schedule.ranks)]
    ring_seconds = {n: _ring_seconds(schedule.ranks, grid, n) for n in {*nbytes}}
    step = max(ends[-1] + ring_seconds[n] for ends, n in zip(timeline.ends, nbytes, strict=True))
    compute = (1 - timeline.bubble) * timeline.makespan
    return GridStep(grid.data * schedule.ranks, step, timeline.makespan, compute)


def _ring_seconds(pipe: int, grid: Grid, nbytes: int) -> float:
    """Return the seconds of a ring over every `pipe`-th rank, beside the other ranks' rings."""
    between = grid.cluster.between
    sharing_ranks = max(1.0, min(pipe, grid.ranks_per_node) / grid.cluster.cards)
    duplex = between.duplex_seconds_per_byte * sharing_ranks
    shared_wire = replace(
        between,
        seconds_per_byte=between.seconds_per_byte * sharing_ranks,
        seconds_per_byte_duplex=duplex,
    )
    clocks = Clocks(
        replace(grid.cluster, between=shared_wire),
        np.arange(grid.data) * pipe // grid.ranks_per_node,
    )
    ring(clocks, nbytes)
    return float(clocks.now.max())
