"""Hierarchical: sums inside each node, one ring per local rank between nodes, copies inside.

Two nodes of two ranks each; the vector is cut into as many *rails* as the smallest node has ranks,
and local rank j owns rail j of its node. `2a` means "the sum of two ranks":

    node rank   start   inside: reduce-scatter   between: a ring per rail   inside: all-gather
      0    0     a b         2a  .                   4a   .                      4a 4b
      0    1     a b          .  2b                   .  4b                      4a 4b
                                                ^ ranks 0 and 2 | ranks 1 and 3
      1    2     a b         2a  .                   4a   .                      4a 4b
      1    3     a b          .  2b                   .  4b                      4a 4b

Index rule: of g rails, rail j is elements j n/g .. (j + 1) n/g, cut at cache lines. If a node has
more than g ranks, those from g on own no rail: they only contribute and receive.

With N nodes 2n(N-1)/N bytes leave each node, as if it were one rank; in a flat ring with ranks in
the order of nodes 2n(P-1)/P. All ranks of a node send at once, each to its own peers, so all
network cards and all cores work. Inside a node, sums go through node memory if the arrays lie there
(direct.py), else by messages.

Cost, g ranks on each of N nodes: 2(g-1) steps of n/g bytes inside, 2(N-1) steps of n/gN between.
The ring makes a rail's sum the same on all nodes, and inside nodes it is only copied: all ranks end
with the same bytes.

Source: Cho, Finkler, Kumar, Kung, Saxena and Sreedhar, "BlueConnect: decomposing all-reduce for
deep learning on heterogeneous network hierarchy", 2019.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hpctrain.collectives.copy_through import part_offsets
from hpctrain.collectives.direct import all_gather, direct, reduce_scatter
from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation
from hpctrain.collectives.ring import ring


def hierarchical(group: Group, x: np.ndarray, op: Operation) -> None:
    """Reduce flat `x` in place over all ranks of `group`; on one node by `direct`, or a ring."""
    if len(group.nodes) < 2:
        (ring if group.node_buffers is None else direct)(group, x, op)
        return
    assert group.node is not None and group.across is not None
    # The offsets of each local rank's rail; ranks beyond the first `rails` have empty rails.
    rails, has_neighbours = min(map(len, group.nodes)), group.node.size > 1
    offsets = part_offsets(x, rails) + [x.size] * (group.node.size - rails)
    rail = reduce_scatter(group, x, op, offsets) if has_neighbours else x
    if rail.size:  # its owners, one on each node, reduce it
        nodes = _single_rank_nodes(group.across.size)
        owners = Group(group.across, group.scratch, nodes=nodes, choices=group.choices)
        ring(owners, rail, op)
    if has_neighbours:
        all_gather(group, x, offsets)


@cache
def _single_rank_nodes(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(count))
