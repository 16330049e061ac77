"""When gradients are sent, in which buckets, and when their sums are applied.

    never    | forward | backward      | reduce | update |
    always   | forward | backward      |wait| update |          two threads
                            | reduce ....... |
    priority | forward | backward      | forward | backward     two threads; u: update of a bucket
                 u u u      | reduce ........ u u u

A communication thread needs a core: where ranks fill the cores of their node it takes from compute
what it gives to the wire, so that `auto` reduces after backward there, in one piece. Between nodes
most of the time is waiting for the wire, and a thread pays.

With FIFO order the last bucket to arrive is the first layer's, which is needed first: an update of
the whole has to wait for it, and priority could gain nothing. So with `priority` an update is made
bucket by bucket, when the next forward pass comes to a layer of it, and all else may still travel:
a step takes max(compute, wire) instead of forward + max(backward, wire). While the pass waits for a
bucket it updates those that are in already. Evaluation, checkpoints and the end wait for all.
Parameters have the same bytes as without.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from hpctrain.collectives import Group
from hpctrain.collectives.direct import direct_shared
from hpctrain.engines.engine import Times
from hpctrain.engines.synchronous.update import InParts
from hpctrain.gradients import buckets
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.reducer import Reducer, Sum, WireOptions
from hpctrain.tuning import select
from hpctrain.watch.trace import Trace
from hpctrain.world import World

#: A transfer cannot be cancelled: with priority buckets are no longer than this, or a layer.
PRIORITY_BYTES = 1 << 20


def pays(world: World, options: WireOptions) -> bool:
    """Return whether to reduce in a communication thread, the same on all ranks; collective."""
    if world.size == 1 or not world.concurrent or options.overlap == "never":
        return False
    spare = cores_to_spare(world)
    return options.overlap == "always" or options.priority or len(world.main.nodes) > 1 or spare


def let_compute(group: Group, concurrent: bool) -> None:
    """Let the links of a communication thread sleep while they wait for other nodes."""
    if concurrent and len(group.nodes) > 1:
        for link in group.links:
            link.patient = True


def cores_to_spare(world: World) -> bool:
    """Return whether every node has more cores than ranks; collective."""
    cores = world.gather(" ".join(map(str, os.sched_getaffinity(0))))
    return all(
        len(set().union(*(cores[rank].split() for rank in node))) > len(node)
        for node in world.main.nodes
    )


def cut(arena: Arena, group: Group, options: WireOptions, concurrent: bool) -> list[Bucket]:
    """Return the buckets of the gradient: of `bucket_bytes`, or of the length that costs least."""
    grad, nbytes = arena.grad, arena.grad.nbytes
    if options.bucket_bytes != "auto":
        nbytes = options.bucket_bytes
    elif concurrent:
        nbytes = select.bucket_bytes(group, grad)
        nbytes = min(nbytes, PRIORITY_BYTES) if options.priority else nbytes
    return buckets.cut(arena.slots, grad.size, grad.itemsize, nbytes)


def shared_form(
    allreduce: Sum, group: Group, grad: np.ndarray, cut: Sequence[Bucket], options: WireOptions
) -> Sum:
    """Return `direct_shared` for `direct`: one array with the sum is enough for all of a node.

    Not with priority: there a neighbour writes its next gradient while we still read.
    """
    longest = max((grad[bucket.start : bucket.stop] for bucket in cut), key=len)
    direct = len(group.nodes) == 1 and select.name_of(allreduce, group, longest) == "direct"
    return direct_shared if direct and not options.priority else allreduce


class AsNeeded:
    """Updates each bucket when the next forward pass needs it, or has to wait anyway."""

    def __init__(self, reducer: Reducer, update: InParts, times: Times, trace: Trace):
        """`update` has the reducer's buckets as its parts."""
        self._reducer, self._update, self._times, self._trace = reducer, update, times, trace
        self._due: set[int] = set()  # buckets whose sums are not applied yet

    def begin(self) -> None:
        """Note that the sums of a step are on their way."""
        self._reducer.complete()
        self._due = set(range(self._reducer.count))

    def need(self, name: str) -> None:
        """Apply the sum of the bucket of slot `name`, unless that was done."""
        number = self._reducer.bucket(name)
        while number in self._due:
            self._take_one(number)

    def finish(self) -> None:
        """Apply all sums that are left."""
        start, waited = perf_counter(), self._times.wait_s
        while self._due:
            self._take_one(max(self._due))
        took = self._trace.add("take what travels", "compute", start, perf_counter())
        self._times.compute_s += took - (self._times.wait_s - waited)
        self._times.wire_s = self._reducer.wire_s

    def _take_one(self, first: int) -> None:
        """Apply the sum of bucket `first`, or of another that arrives before it."""
        with self._trace.span("wait for gradients", "wait", bucket=first) as waiting:
            number = self._reducer.wait_for_one(self._due, first)
        self._times.wait_s += waiting.seconds
        with self._trace.span("update", "compute", bucket=number):
            self._update(number, self._reducer.wait_for(number))
        self._due.discard(number)
        if not self._due:
            self._update.count()
