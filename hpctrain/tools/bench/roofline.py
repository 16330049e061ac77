"""Roofline measured in the same run; results are reported as a fraction of it.

On one node the limit is memory: all ranks stream `a += b` over private arrays; each moves 3n bytes.
On several nodes the limit is the link: one message from one node to another. The arrays have the
length of the measured vector, so both fit into the caches or neither does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hpctrain.collectives import Group
from hpctrain.transport.shared_memory.host import aligned_zeros

BYTES_STREAMED_PER_BYTE = 3  #: bytes moved per byte of `a += b`: two reads, one write


@dataclass(frozen=True)
class Roofline:
    """A call to time beside the contenders, and the bytes it moves in a node or over a link."""

    kind: str
    call: Callable[[], Any]
    nbytes: int


def make_roofline(group: Group, x: np.ndarray) -> Roofline:
    """Return the roofline for vectors like flat `x`: memory on one node, otherwise a link."""
    if len(group.nodes) <= 1:
        a, b = aligned_zeros(x.size, x.dtype), aligned_zeros(x.size, x.dtype)
        b.fill(0)  # untouched pages all map to one page, which stays in the cache
        return Roofline(
            "memory", partial(np.add, a, b, a), BYTES_STREAMED_PER_BYTE * x.nbytes * group.link.size
        )
    source_rank, target_rank = group.nodes[0][0], group.nodes[1][0]
    return Roofline("link", one_way_call(group, x, source_rank, target_rank), x.nbytes)


def one_way_call(group: Group, x: np.ndarray, source: int, target: int) -> Callable[[], None]:
    """Return a call in which rank `source` sends `x` to rank `target`; other ranks do nothing."""
    link = group.link

    def send_message() -> None:
        link.isend(x, target).wait()

    def receive_message() -> None:
        link.irecv(x, source).wait()

    return {source: send_message, target: receive_message}.get(link.rank, _do_nothing)


def _do_nothing() -> None:
    """Do nothing: the clock waits for the two ranks that communicate."""
