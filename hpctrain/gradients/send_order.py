"""The order in which the communication thread sums the buckets of a step, the same on all ranks.

`first_ready`: the order of backward, from the last layer to the first.

`first_needed`: ready buckets of the first layers are sent first, because the next forward pass
needs them first. The ready buckets differ from rank to rank, so before each bucket the ranks agree
on the number that is ready on all ranks (a minimum, 8 bytes), and send the last bucket that is
ready everywhere:

    ready on rank 0      0 1 2 3      agreed: 0 1 2      sent: 2, before 0 and 1
    ready on rank 1      0 1 2

Source: Jayarajan, Wei, Gibson, Fedorova and Pekhimenko, "Priority-based parameter propagation for
distributed DNN training", 2019. The paper sends slices of layers, this file whole buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np

from hpctrain.collectives import Group
from hpctrain.collectives.recursive_doubling import recursive_doubling

#: Yields the number of each bucket to sum next, from a queue of ready buckets that ends with None;
#: collective over the group, and the count is the number of buckets of a step.
SendOrder = Callable[["SimpleQueue[int | None]", Group, int], Iterator[int]]


def first_ready(
    ready_queue: SimpleQueue[int | None], group: Group, bucket_count: int
) -> Iterator[int]:
    """Return the buckets in the order in which they become ready, which all ranks share."""
    return iter(ready_queue.get, None)


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
