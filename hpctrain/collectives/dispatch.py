"""All-reduces by message size: a table, made once per group by tuning/select.py, read per call.

    bytes      0 ........ starts[0] ........... starts[1] ............
    choices     choices[0]    |     choices[1]      |    choices[2]

Each call makes one bisection. All ranks must choose alike, so all have the same table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpctrain.collectives.chunks import STREAM_SEGMENT_BYTES

ReductionFunction = Callable[..., Any]


class Choice(NamedTuple):
    """The all-reduces for one range of lengths."""

    default: ReductionFunction  #: arrays outside of node memory
    in_node_memory: ReductionFunction  #: arrays in node memory
    non_mpi: ReductionFunction  #: arrays that MPI cannot reduce by the operation, in any memory


@dataclass(frozen=True)
class Choices:
    """All-reduces by message size, the cost of buckets on the wire, the length of segments."""

    start_bytes: tuple[int, ...]  #: bytes from which the next choice applies, ascending
    choices: tuple[Choice, ...]  #: one more than `start_bytes`
    buckets: tuple[tuple[int, float], ...]  #: (bytes, seconds per byte), ascending
    measured: bool  #: by `hpctrain tune`; else predicted by the cost model
    gpus: Choices | None = None  #: for arrays on GPUs, if every rank has one; None: the host's
    stream_segment_bytes: int = STREAM_SEGMENT_BYTES  #: of segments between nodes

    def lookup(self, nbytes: int) -> Choice:
        """Return the choice for `nbytes` bytes."""
        return self.choices[bisect_right(self.start_bytes, nbytes)]
