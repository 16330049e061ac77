"""Views of a vector: P chunks, one for each rank, or segments that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

#: It limits the scratch of algorithms that exchange whole vectors, and fits a core's L2 cache.
SEGMENT_BYTES = 1 << 20
#: Segments between nodes. Shorter ones cost too much CPU time at 10 Gbit/s; longer ones, or more
#: receives ahead, fill queues and delay other messages.
STREAM_SEGMENT_BYTES = SEGMENT_BYTES // 2
#: The same where MPI gets pointers of GPUs: each segment costs the host two waits for a stream.
GPU_STREAM_SEGMENT_BYTES = 8 << 20


def bounds(length: int, parts: int, align: int = 1) -> list[int]:
    """Return `parts + 1` offsets that cut `length` elements evenly, at multiples of `align`."""
    units = -(-length // align)
    return [min(length, i * units // parts * align) for i in range(parts + 1)]


def chunks(x: np.ndarray, parts: int) -> list[np.ndarray]:
    """Return `parts` views that cover flat `x`; their lengths differ by one element at most."""
    return slices(x, bounds(x.size, parts))


def slices(x: np.ndarray, offsets: Sequence[int]) -> list[np.ndarray]:
    """Return the views of flat `x` between consecutive `offsets`."""
    return [x[a:b] for a, b in pairwise(offsets)]


def views_of_part(
    arrays: Sequence[np.ndarray], offsets: Sequence[int], part: int
) -> list[np.ndarray]:
    """Return the view of each array between `offsets[part]` and the next offset."""
    return [x[offsets[part] : offsets[part + 1]] for x in arrays]


def segments(x: np.ndarray, segment_bytes: int = SEGMENT_BYTES) -> Iterator[np.ndarray]:
    """Yield views of at most `segment_bytes` that cover flat `x`; none if `x` is empty."""
    step = max(1, segment_bytes // x.itemsize)
    for start in range(0, x.size, step):
        yield x[start : start + step]
