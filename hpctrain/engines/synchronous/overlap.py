"""Overlap of communication and backward: the buckets of gradients, and when they are sent.

    never    | forward | backward      | reduce | update |
    always   | forward | backward      |wait| update |          two threads
                            | reduce ....... |
    priority | forward | backward      | forward | backward     two threads; u: update of a bucket
                 u u u      | reduce ........ u u u

A communication thread needs a core. Where ranks fill the cores of their node, it takes from compute
what it gives to the wire, so that `auto` reduces after backward, in one piece. Between nodes most
of the time is spent waiting for the wire, and a thread pays.

In FIFO order the last bucket to arrive is the first layer's, which the next forward pass needs
first. With `priority` the buckets of the first layers go first, and each bucket is updated when the
next forward pass reaches one of its layers, while others are still on the wire: a step takes
max(compute, wire) instead of forward + max(backward, wire). While the pass waits for a bucket it
updates those that have arrived. Evaluation, checkpoints and the end of training wait for all.
Parameters have the same bytes as without priority.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.collectives import Group
from hpctrain.collectives.direct import direct_shared
from hpctrain.gradients import buckets
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.reducer import SumFunction, WireOptions
from hpctrain.tuning import select
from hpctrain.world import World, has_spare_cores

#: A transfer cannot be cancelled: with priority buckets are no longer than this, or a layer.
PRIORITY_BYTES = 1 << 20


def uses_thread(world: World, options: WireOptions) -> bool:
    """Return whether to reduce in a communication thread, the same on all ranks; collective."""
    if world.size == 1 or not world.concurrent or options.overlap == "never":
        return False
    spare_cores = has_spare_cores(world)
    return (
        options.overlap == "always" or options.priority or len(world.main.nodes) > 1 or spare_cores
    )


def choose_buckets(
    arena: Arena, group: Group, options: WireOptions, concurrent: bool
) -> list[Bucket]:
    """Return the buckets of the gradient: of `bucket_bytes`, or of the fastest length."""
    grad, nbytes = arena.grad, arena.grad.nbytes
    if options.bucket_bytes != "auto":
        nbytes = options.bucket_bytes
    elif concurrent:
        nbytes = select.bucket_bytes(group, grad)
        nbytes = min(nbytes, PRIORITY_BYTES) if options.priority else nbytes
    return buckets.cut_buckets(arena.slots, grad.size, grad.itemsize, nbytes)


def prefer_shared_sum(
    allreduce: SumFunction,
    group: Group,
    grad: np.ndarray,
    gradient_buckets: Sequence[Bucket],
    options: WireOptions,
) -> SumFunction:
    """Return `direct_shared` instead of `direct`: all ranks of a node read one array of sums.

    Not with priority: a neighbour would write its next gradient while this rank still reads.
    """
    slices = (grad[bucket.start : bucket.stop] for bucket in gradient_buckets)
    longest_slice = max(slices, key=len, default=grad)
    is_direct = (
        len(group.nodes) == 1 and select.algorithm_name(allreduce, group, longest_slice) == "direct"
    )
    return direct_shared if is_direct and not options.priority else allreduce
