"""Overlap: when gradients are sent, in which buckets, and when their sums are applied.

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

import os
from collections.abc import Iterable, Sequence

import numpy as np

from hpctrain.collectives import Group
from hpctrain.collectives.direct import direct_shared
from hpctrain.core.errors import ModelError
from hpctrain.engines.engine import Times
from hpctrain.engines.synchronous.update import PartwiseUpdate
from hpctrain.gradients import buckets
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.reducer import Reducer, SumFunction, WireOptions
from hpctrain.tuning import select
from hpctrain.world import World

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


def sleep_while_waiting(group: Group, concurrent: bool) -> None:
    """Let the links of a communication thread sleep while they wait for other nodes."""
    if concurrent and len(group.nodes) > 1:
        for link in group.links:
            link.sleeps_while_waiting = True


def has_spare_cores(world: World) -> bool:
    """Return whether every node has more cores than ranks; collective."""
    cores = world.gather(" ".join(map(str, os.sched_getaffinity(0))))
    return all(
        len(set().union(*(cores[rank].split() for rank in node))) > len(node)
        for node in world.main.nodes
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
    longest = max((grad[bucket.start : bucket.stop] for bucket in gradient_buckets), key=len)
    direct = len(group.nodes) == 1 and select.algorithm_name(allreduce, group, longest) == "direct"
    return direct_shared if direct and not options.priority else allreduce


class DeferredUpdate:
    """Updates each bucket when the next forward pass needs it, or while that pass waits."""

    def __init__(
        self,
        world: World,
        reducer: Reducer,
        update: PartwiseUpdate,
        names: Iterable[str],
        times: Times,
    ):
        """`update` has the reducer's buckets as its parts; `names` are those of all slots."""
        self._reducer, self._update, self._times = reducer, update, times
        self._trace, self._on_all_ranks, self._is_checked = world.trace, world.on_all_ranks, False
        self._unrequested_names = set(names)  # slots for which no gradient has called on_need yet
        self._unapplied: set[int] = set()  # buckets whose sums are not applied yet

    def begin(self) -> None:
        """Begin to wait for the sums of a step, whose gradients are complete.

        Raises ModelError if the first gradient has not called `on_need` for each parameter.
        """
        if not self._is_checked:
            self._on_all_ranks(self._check_calls)
            self._is_checked = True
        self._reducer.finish_backward()
        self._unapplied = set(range(self._reducer.bucket_count))

    def apply_slot(self, name: str) -> None:
        """Apply the sum of the bucket of slot `name`, unless it was applied already."""
        self._unrequested_names.discard(name)
        number = self._reducer.bucket_number(name)
        while number in self._unapplied:
            self._apply_next(number)

    def finish(self) -> None:
        """Apply all remaining sums."""
        with self._times.compute(self._trace, "apply remaining sums"):
            while self._unapplied:
                self._apply_next(max(self._unapplied))
        self._times.wire_s = self._reducer.wire_s

    def _apply_next(self, first: int) -> None:
        """Apply the sum of bucket `first`, or of another bucket that arrives before it."""
        with self._trace.span("wait for gradients", "wait", bucket=first) as waiting:
            number = self._reducer.wait_for_any(self._unapplied, first)
        self._times.wait_s += waiting.seconds
        with self._trace.span("update", "compute", bucket=number):
            self._update(number, self._reducer.wait_for(number))
        self._unapplied.discard(number)
        if not self._unapplied:
            self._update.count()

    def _check_calls(self) -> None:
        if names := self._unrequested_names:
            self._reducer.wait()  # no transfer may be under way when training ends
            more = f" and {len(names) - 1} more" * (len(names) > 1)
            raise ModelError(
                "[wire] priority: expected a model that calls key.on_need(name) before it first "
                f"reads a parameter, seen no call for '{min(names)}'{more} in the first gradient; "
                "add the calls, or set priority = false"
            )
