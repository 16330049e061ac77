"""Roofline measured in the same run; results are reported as a fraction of it.

On one node the floor is memory: all ranks stream `a += b` over private arrays, which moves 3n bytes
each. On several it is the link: one message goes one way between two of them. If arrays fit into
the caches, so do those of the floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpctrain.collectives import Group
from hpctrain.transport.shared_memory.host import aligned_zeros

STREAMED = 3  #: bytes moved per byte of `a += b`: two reads, one write


@dataclass(frozen=True)
class Floor:
    """A call to time beside the rivals, and the bytes that it moves in one node or link."""

    kind: str
    call: Callable[[], Any]
    nbytes: int


def floor_of(group: Group, x: np.ndarray) -> Floor:
    """Return the floor for vectors like flat `x`: of memory on one node, else of a link."""
    if len(group.nodes) <= 1:
        a, b = aligned_zeros(x.size, x.dtype), aligned_zeros(x.size, x.dtype)
        b.fill(0)  # untouched pages all map to one page, which stays in the cache
        return Floor("memory", partial(np.add, a, b, a), STREAMED * x.nbytes * group.link.size)
    first, second = group.nodes[0][0], group.nodes[1][0]
    return Floor("link", one_way(group, x, first, second), x.nbytes)


def one_way(group: Group, x: np.ndarray, source: int, to: int) -> Callable[[], None]:
    """Return a call in which rank `source` sends `x` to rank `to`; other ranks do nothing."""
    link = group.link

    def send() -> None:
        link.isend(x, to).wait()

    def receive() -> None:
        link.irecv(x, source).wait()

    return {source: send, to: receive}.get(link.rank, _nothing)


def _nothing() -> None:
    """Wait for the others, in the clock."""
