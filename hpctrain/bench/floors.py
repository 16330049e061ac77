"""What the machine could do at best, measured in the same run: the share of it tells what is left.

On one node the floor is memory: all ranks stream `a += b` over private arrays, which moves 3n bytes
each. On several it is the link: one message goes one way between two of them. Where arrays fit
into the caches, so do those of the floor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpctrain.collectives import Group
from hpctrain.transport.memory import aligned_zeros

STREAMED = 3  #: bytes moved per byte of `a += b`: two reads, one write


@dataclass(frozen=True)
class Floor:
    """A call to be timed with the rivals, and how many bytes it moves in one node or link."""

    kind: str
    call: Callable[[], Any]
    nbytes: int


def of(group: Group, x: np.ndarray) -> Floor:
    """Return the floor for vectors like flat `x`: of memory on one node, else of a link."""
    if len(group.nodes) <= 1:
        a, b = aligned_zeros(x.size, x.dtype), aligned_zeros(x.size, x.dtype)
        b.fill(0)  # pages that were never written are all one page, and that one is in the cache
        return Floor("memory", partial(np.add, a, b, a), STREAMED * x.nbytes * group.link.size)
    first, second = group.nodes[0][0], group.nodes[1][0]
    return Floor("link", one_way(group, x, first, second), x.nbytes)


def one_way(group: Group, x: np.ndarray, source: int, to: int) -> Callable[[], None]:
    """Return a call in which rank `source` sends `x` to rank `to`, and the others do nothing."""
    link = group.link

    def send() -> None:
        link.isend(x, to).wait()

    def receive() -> None:
        link.irecv(x, source).wait()

    return {source: send, to: receive}.get(link.rank, _nothing)


def _nothing() -> None:
    """Wait for the others, in the clock."""
