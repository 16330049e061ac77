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

The ready buckets differ from rank to rank, so before each bucket the ranks agree on the number that
is ready on all ranks (a minimum, 8 bytes), and send the last bucket that is ready everywhere:

    ready on rank 0      0 1 2 3      agreed: 0 1 2      sent: 2, before 0 and 1
    ready on rank 1      0 1 2

Source: Jayarajan, Wei, Gibson, Fedorova and Pekhimenko, "Priority-based parameter propagation for
distributed DNN training", 2019. The paper sends slices of layers, this file whole buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import numpy as np

from hpctrain.collectives import Group
from hpctrain.collectives.direct import direct_shared
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.engines.engine import Times
from hpctrain.engines.synchronous.update import PartwiseUpdate, ReplicatedUpdate
from hpctrain.gradients import buckets
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.buckets import Bucket
from hpctrain.gradients.reducer import Reducer, SumFunction, WireOptions
from hpctrain.optim import Optimizer
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


def first_needed(
    ready_queue: SimpleQueue[int | None], group: Group, bucket_count: int
) -> Iterator[int]:
    """Yield the buckets of each step: always the last bucket that is ready on all ranks."""
    while True:
        unsent, ready_count = set(range(bucket_count)), 0
        while unsent:
            # Wait until there is an unsent bucket, then count all that are in the queue.
            while ready_count <= min(unsent) or not ready_queue.empty():
                number = ready_queue.get()
                if number is None:
                    return
                ready_count = number + 1
            common_count = np.array([ready_count])
            recursive_doubling(group, common_count, np.minimum)
            number = max(i for i in unsent if i < common_count[0])
            unsent.remove(number)
            yield number


class UpdateOnNeed(ReplicatedUpdate):
    """Applies the sums of a reducer bucket by bucket, during the next forward pass.

    It stands in front of the reducer: a step waits for no sum, unless it has failed.
    """

    is_replicated = False

    def __init__(
        self,
        world: World,
        arena: Arena,
        optimizer: Optimizer,
        make_reducer: Callable[[], Reducer],
        times: Times,
    ):
        """Keep the whole state, then make the reducer; waits are added to `times`. Collective."""
        super().__init__(world.link, arena, optimizer)
        self.own = None
        self._reducer = make_reducer()
        self._times, self._trace = times, world.trace
        self.mark_ready, self.close = self._reducer.mark_ready, self._reducer.close
        parts = [slice(x.bucket.start, x.bucket.stop) for x in self._reducer.sums]
        self._bucket_update = PartwiseUpdate(
            optimizer, self.state, arena.param, arena.layout, parts
        )
        self._unapplied_buckets: set[int] = set()  # buckets whose sums are not applied yet

    @property
    def wire_s(self) -> float:
        """The time of sums since the start."""
        return self._reducer.wire_s

    def wait(self) -> np.ndarray:
        """Return the plane of gradients, while sums are on the wire."""
        assert not self._unapplied_buckets  # a gradient was written over a sum
        return self._arena.grad

    def __call__(self, gradient: np.ndarray) -> None:
        """Begin to wait for the sums of a step."""
        self._reducer.finish_backward()
        self._unapplied_buckets.update(range(len(self._reducer.sums)))

    def release(self) -> None:
        """Wait for the sums of a step that has failed, of which none is applied."""
        if not self._unapplied_buckets:
            with self._times.wait(self._trace, "wait for gradients"):
                self._reducer.wait()

    def on_need(self, name: str) -> None:
        """Apply the sum of the bucket of slot `name`, unless it was applied already."""
        number = self._reducer.bucket_number(name)
        while number in self._unapplied_buckets:
            self._apply_next(number)

    def settle(self) -> None:
        """Apply all remaining sums; then all ranks hold the same parameters."""
        with self._times.compute(self._trace, "apply remaining sums"):
            while self._unapplied_buckets:
                self._apply_next(max(self._unapplied_buckets))
        self._times.wire_s = self._reducer.wire_s

    def _apply_next(self, first: int) -> None:
        """Apply the sum of bucket `first`, or of another bucket that arrives before it."""
        with self._times.wait(self._trace, "wait for gradients", bucket=first):
            number = self._reducer.wait_for_any(self._unapplied_buckets, first)
        with self._trace.span("update", "compute", bucket=number):
            self._bucket_update(number, self._reducer.wait_for(number))
        self._unapplied_buckets.discard(number)
        if not self._unapplied_buckets:
            self._bucket_update.count()
