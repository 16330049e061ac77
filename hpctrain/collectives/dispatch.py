"""Table of all-reduces by message size: made once per group by tuning/select.py, read per call.

    bytes      0 ........ starts[0] ........... starts[1] ............
    picks       picks[0]      |     picks[1]        |    picks[2]

One bisection per call; all ranks must choose alike, so all have the same table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Function = Callable[..., Any]


class Pick(NamedTuple):
    """The all-reduces for one range of lengths."""

    plain: Function  #: arrays outside of node memory
    kept: Function  #: arrays in node memory
    ours: Function  #: dtypes and operations that MPI does not reduce, in any memory


@dataclass(frozen=True)
class Choices:
    """The picks by size, and the cost of buckets of several lengths on the wire."""

    starts: tuple[int, ...]  #: bytes from which the next pick applies, ascending
    picks: tuple[Pick, ...]  #: one more than `starts`
    buckets: tuple[tuple[int, float], ...]  #: (bytes, seconds per byte), ascending
    measured: bool  #: by `hpctrain tune`; else predicted by the cost model
    gpus: Choices | None = None  #: for arrays on GPUs, if every rank has one; None: the host's

    def of(self, on_gpu: bool) -> Choices:
        """Return the choices for arrays on GPUs, or on the host."""
        return self.gpus if on_gpu and self.gpus is not None else self

    def at(self, nbytes: int) -> Pick:
        """Return the pick for `nbytes` bytes."""
        return self.picks[bisect_right(self.starts, nbytes)]
