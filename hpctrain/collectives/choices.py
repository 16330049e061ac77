"""Which all-reduce for how many bytes: made once per group by tuning/select.py, asked per call.

    bytes      0 ........ starts[0] ........... starts[1] ............
    picks       picks[0]      |     picks[1]        |    picks[2]

One bisection per call; no rank may choose otherwise than its peers, so all have the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Pick(NamedTuple):
    """What reduces arrays of one range of lengths."""

    plain: Function  #: arrays that neighbours do not see
    kept: Function  #: arrays in the memory of the node, which they do
    ours: Function  #: dtypes and operations that MPI does not reduce, whoever sees the array


@dataclass(frozen=True)
class Choices:
    """The staircase of picks, and what buckets of some lengths cost on the wire."""

    starts: tuple[int, ...]  #: bytes from which the next pick holds, ascending
    picks: tuple[Pick, ...]  #: one more than `starts`
    buckets: tuple[tuple[int, float], ...]  #: (bytes, seconds per byte), ascending
    measured: bool  #: by `hpctrain tune`; else predicted by the cost model
    gpus: Choices | None = None  #: for arrays on GPUs, where every rank has one; else as the host's

    def of(self, on_gpu: bool) -> Choices:
        """Return the choices for arrays of GPUs, or for those of the host."""
        return self.gpus if on_gpu and self.gpus is not None else self

    def at(self, nbytes: int) -> Pick:
        """Return what reduces `nbytes` bytes."""
        return self.picks[bisect_right(self.starts, nbytes)]
